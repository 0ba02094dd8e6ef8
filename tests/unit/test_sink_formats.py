"""Every format: written by the sink, loaded by the real libraries, equal bit by bit, and damage seen in each."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hsjournal.errors import UsageError
from hsjournal.sink import gather
from hsjournal.sink.formats import LAYOUTS, layout_named, refuse_wrong_norm
from hsjournal.sink.layouts import Container, file_name
from hsjournal.sink.output import Output
from hsjournal.sink.sample import Written
from hsjournal.sink.stream import Sink
from hsjournal.sink.verify import Damage, DamageError, verify_file
from tests.helpers.runs import make_manifest
from tests.helpers.sinks import Made, Place, ignore

IDS = ("N",), (1, "N")
STATES = {
    # format: (aux key, its shape), (final key, its shape), ids key; None where another key has it
    "specforge": (("aux_hidden_state", "1,N,kH"), ("hidden_state", "1,N,H"), "input_ids"),
    "specforge-dflash": (("hidden_states", "1,N,kH"), None, "input_ids"),
    "specforge-dspark": (("hidden_states", "1,N,kH"), ("target_last_hidden_states", "1,N,H"), "input_ids"),
    "speculators": (("hidden_states", "N,k+1,H"), None, "token_ids"),
    "modelopt": (("aux_hidden_states", "N,kH"), ("hidden_states", "N,H"), "input_ids"),
    "torchspec": (("hidden_states", "1,N,kH"), ("last_hidden_states", "1,N,H"), "input_ids"),
    "angelslim": (("hidden_states", "1,N,kH"), ("target_hiddens", "1,N,H"), "input_ids"),
    "safetensors": (("aux_hidden_states", "N,k,H"), ("last_hidden_states", "N,H"), "input_ids"),
}


def make(place: Place, name: str, **options: Any) -> Made:
    norm = LAYOUTS[name].final_norm or options.pop("norm", "post")
    made = place.make(final_norm=norm, **options)
    return Made(made.dump, replace(made.sample, final_norm=norm), made.root)


def write(place: Place, name: str, made: Made) -> Written:
    with closing(Sink(place.out, LAYOUTS[name], place.rejects)) as sink, made.opened() as dump:
        return sink.write(dump, made.sample, ignore)


def load(path: Path, container: Container) -> dict[str, Any]:
    if container is Container.TORCH:
        loaded: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
        return loaded
    return dict(load_file(path))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_the_table_of_this_test_is_whole():
    assert STATES.keys() == LAYOUTS.keys()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_real_library_loads_the_very_bits(tmp_path, name, dtype):
    place = Place(tmp_path)
    n, h, k = 37, 40, 3
    made = make(place, name, num_tokens=n, hidden=h, dtype=dtype, sample_id="topics/é \udcff?")
    written = write(place, name, made)
    data = load(place.out / written.path, LAYOUTS[name].container)
    (aux_key, aux_shape), final, ids_key = STATES[name]
    sizes = {"N": n, "H": h, "k": k, "kH": k * h, "k+1": k + 1, "1": 1}
    expected = {aux_key: (aux_shape, made.dump.aux_interleaved)}
    if name == "speculators":
        expected[aux_key] = (aux_shape, np.concatenate([*made.dump.arrays.values()], axis=1))
    if final is not None:
        expected[final[0]] = (final[1], made.dump.final)
    for key, (shape, bits) in expected.items():
        assert data[key].shape == tuple(sizes[s] for s in shape.split(",")), key
        assert str(data[key].dtype) == f"torch.{dtype}"
        assert raw(data[key]) == bits.tobytes(), key
        assert data[key].data_ptr() % 8 == 0
    assert data[ids_key].dtype == torch.int64
    assert data[ids_key].flatten().tolist() == list(made.sample.input_ids)
    if "loss_mask" in data:
        assert data["loss_mask"].dtype == torch.int64
        assert data["loss_mask"].flatten().tolist() == [0] * 25 + [1] * 12
        assert data["loss_mask"].shape == data[ids_key].shape
    assert str(verify_file(place.out, LAYOUTS[name], made.sample, written, ignore))
    said = data.get("hsjournal", data.get("metadata"))
    if isinstance(said, torch.Tensor):
        said = json.loads(bytes(said.tolist()))
    assert said == made.sample.provenance(written.source_xxh3)
    assert len(set(said["source_xxh3"])) == k + 1  # also of a state that is left out


WIDTHS = (64, 576, 7168)


def covering(number: int) -> list[tuple[int, int, int]]:
    """Tokens, hidden size and aux layers for the format of this number: over any three formats, every edge meets every width."""
    aux = [1 + (number + step) % 5 for step in range(4)]
    first, second, third = (WIDTHS[(number + step) % 3] for step in range(3))
    long = (32_768, 64, aux[0]) if number % 2 else (32_768, 576, 1)
    return [(1, first, aux[1]), (511, first, aux[1]), (512, second, aux[2]), (513, third, aux[3]), long]


def due_of(made: Made, name: str) -> Any:
    """The bits of the key that holds the aux states."""
    return np.concatenate([*made.dump.arrays.values()], axis=1) if name == "speculators" else made.dump.aux_interleaved


def check_bits(place: Place, name: str, made: Made) -> None:
    """Written, loaded by the library, and read back: the same."""
    written = write(place, name, made)
    data = load(place.out / written.path, LAYOUTS[name].container)
    (aux_key, _), final, ids_key = STATES[name]
    due = due_of(made, name)
    got = data[aux_key].view(torch.int16).numpy().view(np.uint16).reshape(due.shape)
    assert np.array_equal(got, due), due.shape
    if final is not None:
        assert raw(data[final[0]]) == made.dump.final.tobytes(), due.shape
    assert data[ids_key].flatten().tolist() == list(made.sample.input_ids)
    assert str(verify_file(place.out, LAYOUTS[name], made.sample, written, ignore))


@pytest.mark.parametrize("copy_below", [gather.COPY_BELOW, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_sizes_around_every_block_and_tile(tmp_path, monkeypatch, name, copy_below):
    """Edges of tiles, blocks and rows: what lay in the dump is what the library loads and what the read-back proves."""
    monkeypatch.setattr(gather, "COPY_BELOW", copy_below)  # at 1, narrow rows too are read straight to their places
    for row, (n, h, k) in enumerate(covering(list(LAYOUTS).index(name))):
        place = Place(tmp_path / str(row))
        place.base.mkdir()
        check_bits(place, name, make(place, name, row=row, num_tokens=n, hidden=h, num_aux=k))
        shutil.rmtree(place.base)


def test_every_edge_meets_every_width():
    met = {(n, h) for number in range(len(LAYOUTS)) for n, h, _ in covering(number)}
    assert met >= {(n, h) for n in (1, 511, 512, 513) for h in WIDTHS} | {(32_768, 64), (32_768, 576)}


def test_the_longest_sample_of_a_wide_model(record_property):
    """0.94 GB of states side by side; all in shared memory, so that no disk decides how long it takes (some 10 s alone)."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hsjournal-test-") as folder:
        place = Place(Path(folder))
        made = make(place, "speculators", num_tokens=32_768, hidden=7168, num_aux=1)
        began = time.monotonic()
        check_bits(place, "speculators", made)
        record_property("seconds", round(time.monotonic() - began, 1))


def test_what_only_some_formats_say(tmp_path):
    place = Place(tmp_path)
    for row, norm in enumerate(("post", "pre")):
        made = make(place, "modelopt", row=row, norm=norm)
        data = torch.load(place.out / write(place, "modelopt", made).path, weights_only=True)
        assert data["hidden_states_prenorm"] is (norm == "pre")
        assert data["conversation_id"] == f"sample-{row}"
        plain = write(place, "safetensors", made)
        with safe_open(place.out / plain.path, "pt") as file:
            assert file.metadata() == {"format": "pt", "final_norm": norm, "capture_layers": "1,3,5"}
    data = torch.load(place.out / write(place, "torchspec", make(place, "torchspec", row=9)).path, weights_only=True)
    assert (data["packed_loss_mask"], data["data_id"]) == ("25,12", "sample-9")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_change_anywhere_in_the_file_is_seen(tmp_path, name):
    place = Place(tmp_path)
    made = make(place, name, num_tokens=9, hidden=8)
    written = write(place, name, made)
    path = place.out / written.path
    sound = path.read_bytes()
    for at in {*range(0, len(sound), 41), *range(12), len(sound) - 1}:
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with pytest.raises(DamageError):
            verify_file(place.out, LAYOUTS[name], made.sample, written, ignore)
    for wrong in (sound[:-1], sound + b"\0", b""):
        path.write_bytes(wrong)
        with pytest.raises(DamageError) as caught:
            verify_file(place.out, LAYOUTS[name], made.sample, written, ignore)
        assert caught.value.kind is Damage.WRONG_SIZE
    path.write_bytes(sound)
    verify_file(place.out, LAYOUTS[name], made.sample, written, ignore)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_file_whose_commit_was_lost_is_recognised_by_what_it_says(tmp_path, name):
    place = Place(tmp_path)
    made = make(place, name)
    written = write(place, name, made)
    run = tmp_path / "run"
    from hsjournal.config import RunPaths

    manifest = replace(make_manifest(RunPaths.of(run), place.root, out=place.out), format=name)
    with closing(Output(manifest, place.rejects)) as output:
        assert output.inspect(made.sample) == written
        other = replace(made.sample, sample_id="another")
        assert output.path_of(made.sample) == written.path
        assert output.inspect(replace(other, row=made.sample.row)) is None


def test_names_made_of_ids_are_safe_and_never_meet():
    ids = [
        "a",
        "a.b-c_9",
        "A.b-c_9",
        "../evil",
        "a/b",
        "a\\b",
        ".hidden",
        "",
        "x" * 300,
        "名",
        "case",
        "Case",
        "CASE",
        "a b",
        "A b",
        "a_b",
        file_name("a b"),
        "\udcff",
    ]
    names = [file_name(one) for one in ids]
    assert len({name.casefold() for name in names}) == len(ids)
    for one in names:
        assert "/" not in one
        assert not one.startswith(".")
        assert len(one.encode()) < 200
    assert names[:2] == ids[:2]


def test_a_state_of_the_other_norm_is_refused_with_what_to_do():
    for name, layout in LAYOUTS.items():
        for norm in ("post", "pre"):
            if layout.final_norm in (None, norm):
                refuse_wrong_norm(layout, norm)
                continue
            with pytest.raises(UsageError, match=name) as caught:
                refuse_wrong_norm(layout, norm)
            assert "--capture-prenorm" in str(caught.value)
            assert "safetensors" in str(caught.value)
    with pytest.raises(UsageError, match="specforge-dspark"):
        layout_named("nothing")
