"""The container written without torch, held against torch; and its independent reader, held against torch.save."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import random
import zipfile
from typing import Any

import pytest
import torch

from hsjournal.sink import torch_zip
from hsjournal.sink.formats import LAYOUTS
from hsjournal.sink.layouts import Container, Content, Key, Layout, Tensor, Value
from hsjournal.sink.pieces import Rows
from hsjournal.sink.torch_read import FormatError, StoredTensor, read_torch_file
from tests.helpers.sinks import Place

ENTRIES = (
    Tensor("ids", "int64", (3,), 24, torch.arange(3).numpy().tobytes()),
    Tensor("states", "bfloat16", (1, 3, 4), 24, bytes(range(24))),
    Tensor("odd", "float32", (1, 1), 4, b"\0\0\x80?"),
    Value("mask", "2,1"),
    Value("about", None),
)
ABOUT: dict[str, Any] = {"text": "ein \udcff 名", "small": -5, "large": 1 << 40, "list": [1, "two", []], "yes": True}


def compose() -> bytes:
    data = b""
    for piece in torch_zip.compose(ENTRIES, lambda: ABOUT):
        assert not isinstance(piece, Rows)
        data += piece
    return data


def read(data: bytes) -> dict[str, Any]:
    return read_torch_file(lambda offset, nbytes: data[offset : offset + nbytes], len(data))


def check(data: bytes) -> None:
    got = torch.load(io.BytesIO(data), weights_only=True)
    assert list(got) == ["ids", "states", "odd", "mask", "about"]
    assert got["ids"].tolist() == [0, 1, 2]
    assert got["states"].dtype == torch.bfloat16
    assert got["states"].shape == (1, 3, 4)
    assert got["states"].is_contiguous()
    assert got["states"].view(torch.uint8).flatten().tolist() == list(range(24))
    assert got["odd"].item() == 1.0
    assert got["mask"] == "2,1"
    assert got["about"] == ABOUT
    assert not got["states"].requires_grad
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        for info in archive.infolist():
            header = data[info.header_offset : info.header_offset + 30]
            start = (
                info.header_offset
                + 30
                + int.from_bytes(header[26:28], "little")
                + int.from_bytes(header[28:30], "little")
            )
            assert start % 64 == 0
            assert info.compress_type == zipfile.ZIP_STORED
        assert archive.read("archive/byteorder") == b"little"
        assert archive.read("archive/version") == b"3\n"
        assert len(archive.read("archive/.data/serialization_id")) == 40
    assert len(names) == len(set(names)) == 7
    mine = read(data)
    assert mine["about"] == ABOUT
    assert mine["states"] == StoredTensor("bfloat16", (1, 3, 4), data.index(bytes(range(24))), 24)


def test_torch_and_zip_tools_read_it():
    check(compose())
    assert compose() == compose()


@pytest.mark.parametrize("limit", [0, 10, 24, 25, 100, 1000])
def test_zip64_in_every_place_where_it_may_be_needed(monkeypatch, limit):
    """A lowered limit: small sizes and offsets written as large ones are."""
    monkeypatch.setattr(torch_zip, "ZIP64_FROM", limit)
    check(compose())


def test_the_pickle_holds_only_what_weights_only_allows():
    names = {opcode.name for opcode, _, _ in pickletools.genops(torch_zip.pickle(ENTRIES, lambda: ABOUT))}
    assert names <= {
        "PROTO", "EMPTY_DICT", "MARK", "BINUNICODE", "GLOBAL", "BININT", "LONG1", "TUPLE", "BINPERSID", "NEWFALSE",
        "NEWTRUE", "EMPTY_TUPLE", "REDUCE", "EMPTY_LIST", "APPENDS", "SETITEMS", "STOP",
    }  # fmt: skip


def test_what_is_not_plain_is_refused():
    with pytest.raises(TypeError, match="not plain"):
        torch_zip.pickle((Value("x", None),), lambda: {"x": object()})


def test_a_failed_read_of_a_real_torch_file_would_show(tmp_path):
    """The independent reader understands what torch.save itself writes."""
    saved = {
        "hidden_state": torch.randn(1, 5, 8).to(torch.bfloat16),
        "aux": torch.randn(3, 4, dtype=torch.float16),
        "f": torch.randn(2, 2),
        "input_ids": torch.arange(5),
        "empty": torch.zeros(0, 3),
        "meta": {"id": "x", "layers": [1, 2, 3], "rate": 0.5, "none": None, "yes": True, "pair": (1, 2, 3, 4)},
    }
    torch.save(saved, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    got = read(data)
    assert got["meta"] == saved["meta"]
    for name in ("hidden_state", "aux", "f", "input_ids", "empty"):
        place, tensor = got[name], saved[name]
        assert isinstance(tensor, torch.Tensor)
        assert (place.dtype, place.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert data[place.offset : place.offset + place.nbytes] == bytes(
            tensor.contiguous().view(torch.uint8).flatten().tolist()
        )
    torch.save({"view": torch.arange(12).reshape(3, 4)[1:]}, tmp_path / "b.pt")  # the tail of a storage
    data = (tmp_path / "b.pt").read_bytes()
    view = read(data)["view"]
    assert data[view.offset : view.offset + view.nbytes] == torch.arange(4, 12).numpy().tobytes()


class Evil:
    def __reduce__(self):
        return (os.system, ("touch pwned",))


def _archive(payload: bytes, name: str = "archive/data.pkl") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, payload)
        archive.writestr("archive/data/0", bytes(16))
    return out.getvalue()


@pytest.mark.parametrize(
    "payload",
    [
        pickle.dumps({"x": Evil()}, protocol=2),
        pickle.dumps({"x": {1, 2}}, protocol=2),
        pickle.dumps([1], protocol=2),
        pickle.dumps({1: 2}, protocol=2),
        b"",
        b"\x80\x02}",
        b"\x80\x02t.",
        b"\x80\x02h\x05.",
        b"\x80\x02}(X\x01\x00\x00\x00au.",
        b"\x80\x02ccollections\nOrderedDict\nK\x01R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    ],
)
def test_hostile_pickles_are_refused_and_not_run(tmp_path, monkeypatch, payload):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError):
        read(_archive(payload))
    assert list(tmp_path.iterdir()) == []


def test_a_transposed_view_is_refused(tmp_path):
    torch.save({"x": torch.arange(6).reshape(2, 3).T}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="not contiguous"):
        read((tmp_path / "a.pt").read_bytes())


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # pickletools on a damaged pickle
def test_no_damage_of_a_file_gets_past_format_error(tmp_path):
    """Whatever is cut, flipped or overwritten: a dictionary or FormatError, never another exception."""
    sound = compose()
    dice = random.Random(3)
    refused = 0
    for _ in range(3000):
        bad = bytearray(sound)
        for _ in range(dice.choice([1, 1, 1, 8])):
            bad[dice.randrange(len(bad))] = dice.randrange(256)
        if dice.random() < 0.2:
            del bad[dice.randrange(len(bad)) :]
        try:
            assert isinstance(read(bytes(bad)), dict)
        except FormatError:
            refused += 1
    assert refused > 500


def test_a_format_that_would_lose_or_double_states_is_refused():
    keys = (Key("a", Content.AUX, (1, "N", "kH")), Key("b", Content.ALL, ("N", "k+1", "H")))
    for wrong in (keys, keys[:1], ()):
        with pytest.raises(ValueError, match="every state once"):
            Layout("x", "{row}", 10, Container.TORCH, None, wrong)


def test_another_trainers_format_is_only_data(tmp_path, monkeypatch):
    """TorchSpec's keys, and speculators' shape: no code of the sink knows them."""
    place = Place(tmp_path)
    made = place.make(37)
    layout = Layout(
        name="made up",
        path="samples/{sha1}.pt",
        group=1,
        container=Container.TORCH,
        final_norm=None,
        keys=(
            Key("data_id", Content.SAMPLE_ID),
            Key("packed_loss_mask", Content.MASK_RUNS),
            Key("hidden_states", Content.ALL, ("N", "k+1", "H")),
            Key("input_ids", Content.IDS, (1, "N")),
            Key("hsjournal", Content.PROVENANCE),
        ),
    )
    from hsjournal.sink.stream import Sink
    from hsjournal.sink.verify import verify_file
    from tests.helpers.sinks import ignore

    with made.opened() as dump:
        written = Sink(place.out, layout, place.rejects).write(dump, made.sample, ignore)
    verify_file(place.out, layout, made.sample, written, ignore)
    got = torch.load(place.out / written.path, weights_only=True)
    assert got["data_id"] == "sample-7"
    assert got["packed_loss_mask"] == "25,12"
    assert got["input_ids"].shape == (1, 37)
    assert torch.equal(
        got["hidden_states"][:, -1].view(torch.int16), torch.from_numpy(made.dump.final.view("i2").copy())
    )


def test_specforges_paths():
    layout = LAYOUTS["specforge"]
    assert [layout.path_of(row, "x") for row in (0, 1999, 2000, 37311)] == [
        "rows_0-2000/data_0.ckpt",
        "rows_0-2000/data_1999.ckpt",
        "rows_2000-4000/data_2000.ckpt",
        "rows_36000-38000/data_37311.ckpt",
    ]
