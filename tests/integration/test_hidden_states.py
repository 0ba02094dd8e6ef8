"""`HiddenStates`: a run as a torch Dataset, in every format, in worker processes, while the run goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hsjournal.config import Manifest
from hsjournal.data import HiddenStates, ReleasedError, pad
from hsjournal.journal.store import Journal, Move
from hsjournal.ops.export import export
from hsjournal.ops.release import Named, release
from hsjournal.sink.formats import LAYOUTS
from hsjournal.sink.verify import Damage, DamageError
from hsjournal.states import Actor, State, Transition
from tests.helpers.runs import MadeRun, make_run, mask_of

MIXED = [State.VERIFIED, State.PENDING, State.VERIFIED, State.WRITTEN, State.SKIPPED, State.VERIFIED]


def as_format(run: MadeRun, name: str, out: Path) -> None:
    """The run as if it had been made in another format: its files are those of an export."""
    export(run.paths, name, out)
    with Journal(run.paths.journal) as journal:
        from hsjournal.catalogue.index import entries

        held = {e.row: e for e in entries(journal)}
        import json

        for line in (out / "index.jsonl").read_text().splitlines():
            entry = json.loads(line)
            values = {"output_path": entry["file"], "output_bytes": entry["bytes"], "output_xxh3": entry["xxh3_128"]}
            assert entry["row"] in held
            journal.touch(entry["row"], State.VERIFIED, journal.epoch, **values)
    manifest = Manifest.load(run.paths.manifest)
    run.paths.manifest.write_text(replace(manifest, format=name, out_dir=str(out)).to_toml())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_items_are_what_was_captured(tmp_path: Path, dtype: str) -> None:
    run = make_run(tmp_path, MIXED, dtype=dtype)
    data = HiddenStates(run.paths.run_dir, check=True)
    assert [entry.row for entry in data.index] == [0, 2, 5]
    assert data.lengths.tolist() == [len(run.ids[row]) for row in (0, 2, 5)]
    for item in (data[i] for i in range(len(data))):
        row, n = item["row"], len(run.ids[item["row"]])
        file = torch.load(run.outputs()[row], weights_only=True)
        assert item["id"] == f"sample {row}"
        assert item["input_ids"].tolist() == list(run.ids[row])
        zeros, ones = mask_of(n)
        assert item["loss_mask"].tolist() == [0] * zeros + [1] * ones
        assert (item["input_ids"].dtype, item["loss_mask"].dtype) == (torch.int64, torch.int64)
        assert (item["aux"].shape, item["final"].shape) == ((n, 3, 64), (n, 64))
        assert str(item["aux"].dtype) == f"torch.{dtype}"
        assert torch.equal(item["aux"].reshape(n, -1).view(torch.int16), file["aux_hidden_state"][0].view(torch.int16))
        assert torch.equal(item["final"].view(torch.int16), file["hidden_state"][0].view(torch.int16))
    before = run.outputs()[0].read_bytes()
    data[0]["final"].zero_()
    assert run.outputs()[0].read_bytes() == before
    with pytest.raises(IndexError):
        data[3]


@pytest.mark.parametrize("name", [n for n, layout in LAYOUTS.items() if layout.final_norm != "pre"])
def test_every_format_gives_the_same_items(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 3)
    wanted = [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in item.items()} for item in items(run)]
    as_format(run, name, tmp_path / "other")
    for got, want in zip(items(run, check=True), wanted, strict=True):
        assert got.keys() == want.keys() - ({"final"} if LAYOUTS[name].drops_final else set())
        for key, value in got.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.reshape(-1).view(torch.uint8), want[key].reshape(-1).view(torch.uint8)), key
            else:
                assert value == want[key]


@pytest.mark.parametrize("name", ["specforge", "torchspec", "speculators"])
def test_an_item_is_taken_without_the_journal(tmp_path: Path, name: str) -> None:
    """Workers of a DataLoader would all read the journal that a live run writes."""
    run = make_run(tmp_path, [State.VERIFIED] * 3)
    manifest = Manifest.load(run.paths.manifest)
    if name != manifest.format:
        run.paths.manifest.write_text(replace(manifest, final_norm=LAYOUTS[name].final_norm or "post").to_toml())
        as_format(run, name, tmp_path / "other")
    data = HiddenStates(run.paths.run_dir)
    run.paths.journal.rename(tmp_path / "away.db")
    for index in range(3):
        zeros, ones = mask_of(len(run.ids[index]))
        assert data[index]["loss_mask"].tolist() == [0] * zeros + [1] * ones


@pytest.mark.parametrize("packed", ["1,2", "no,mask", "-1,2", ""])
def test_a_packed_mask_that_is_none_is_damage(tmp_path: Path, packed: str) -> None:
    run = make_run(tmp_path, [State.VERIFIED])
    as_format(run, "torchspec", tmp_path / "other")
    (path,) = (tmp_path / "other").rglob("*.pt")
    torch.save(torch.load(path, weights_only=True) | {"packed_loss_mask": packed}, path)
    with Journal(run.paths.journal) as journal:
        journal.touch(0, State.VERIFIED, journal.epoch, output_bytes=path.stat().st_size)
    with pytest.raises(DamageError, match="loss mask"):
        items(run)


def items(run: MadeRun, *, check: bool = False) -> list[dict[str, Any]]:
    data = HiddenStates(run.paths.run_dir, check=check)
    return [data[i] for i in range(len(data))]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_in_dataloader_workers(tmp_path: Path, context: str) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 9)
    data = HiddenStates(run.paths.run_dir)
    data[0]  # something is mapped before the fork
    loader = DataLoader(data, batch_size=2, num_workers=2, collate_fn=pad, multiprocessing_context=context)
    seen: dict[int, torch.Tensor] = {}
    for batch in loader:
        for number, row in enumerate(batch["row"].tolist()):
            n = int(batch["attention_mask"][number].sum())
            assert batch["input_ids"][number, :n].tolist() == list(run.ids[row])
            assert not batch["aux"][number, n:].any()
            seen[row] = batch["final"][number, :n].clone()
    assert sorted(seen) == list(range(9))
    for index in range(9):
        assert torch.equal(seen[index].view(torch.int16), data[index]["final"].view(torch.int16))


def test_it_follows_a_run_that_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, MIXED)
    data = HiddenStates(run.paths.run_dir)
    with Journal(run.paths.journal) as journal:  # a writer is there, as beside a live run
        move = Transition(State.WRITTEN, State.VERIFIED, Actor.WORKER, "")
        journal.apply([Move(3, 1, move, {"verify_method": "direct"})], journal.epoch)
        assert len(data) == 3
        assert data.refresh() == 4
        assert [entry.row for entry in data.index] == [0, 2, 3, 5]
        release(run.paths, [Named(row=2)])
        with pytest.raises(ReleasedError, match="refresh"):
            data[1]
        assert data.refresh() == 3
        assert [data[i]["row"] for i in range(3)] == [0, 3, 5]


def test_damage_is_named_not_trained_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 4)
    files = run.outputs()
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 1
    files[0].write_bytes(content)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].unlink()
    data = HiddenStates(run.paths.run_dir)
    data[0]  # a flipped bit inside the states is seen by the digest only
    data.check = True
    for index, kind in enumerate((Damage.WRONG_DIGEST, Damage.WRONG_SIZE, Damage.MISSING)):
        with pytest.raises(DamageError) as caught:
            data[index]
        assert caught.value.kind is kind
    data[3]


def test_a_swapped_file_of_the_same_size_is_seen_without_digests(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 2, tokens=[6, 6])
    first, second = run.outputs()[0], run.outputs()[1]
    a, b = first.read_bytes(), second.read_bytes()
    assert len(a) == len(b)
    first.write_bytes(b)
    with pytest.raises(DamageError, match="row 1, not 0"):
        HiddenStates(run.paths.run_dir)[0]
