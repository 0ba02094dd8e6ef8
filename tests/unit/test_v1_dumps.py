"""Reading what a v1 server leaves, none of it trusted; and whose it is."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hsjournal.dump.protocol import RequestId, token_ids_sha256
from hsjournal.dump.reader import Expectation, open_dump, open_root
from hsjournal.errors import DumpRejectedError, Reject
from hsjournal.server.v1 import dumps, handing_on
from hsjournal.server.v1.dumps import Found
from hsjournal.server.v1.taking import Awaited, decide
from tests.helpers.v1_server import HIDDEN, LAYERS, V1Server, states

IDS = list(range(5, 25))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    folder = tmp_path / "root"
    folder.mkdir()
    fd = open_root(folder)
    yield folder, fd
    os.close(fd)


def test_it_becomes_a_v2_dump_with_the_very_same_bits(root: tuple[Path, int]) -> None:
    folder, fd = root
    V1Server(folder).dump(IDS, dtype=torch.bfloat16)
    found = dumps.look(fd, "req_0")
    assert (found.num_tokens, found.hidden_size, found.dtype) == (20, HIDDEN, "bfloat16")
    rid = RequestId.sample("test", 3, 1, 20)
    digest = token_ids_sha256(IDS)
    meta = handing_on.meta_of(found, str(rid), digest, LAYERS, "post", "boot")
    assert "not proven" in meta.versions["identity"]
    handing_on.publish(fd, found, meta)
    expect = Expectation(rid, 20, HIDDEN, "bfloat16", LAYERS, "post", digest, "boot")
    with open_dump(fd, rid, expect) as dump:
        for source, file in enumerate(dump.fds):
            bits = states(IDS, source).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
            assert os.pread(file, 1 << 20, 0) == bits
    assert dumps.remove(fd, found) > 0
    assert os.listdir(folder) == [str(rid)]


def test_a_leading_one_is_no_other_shape(root: tuple[Path, int]) -> None:
    folder, fd = root
    place = V1Server(folder).dump(IDS)
    for path in place.glob("*.pt"):
        torch.save(torch.load(path)[None], path)
    assert dumps.look(fd, "req_0").num_tokens == 20


def a_link(place: Path) -> None:
    (place / "final.pt").rename(place.parent / "elsewhere")
    (place / "final.pt").symlink_to(place.parent / "elsewhere")


def a_fifo(place: Path) -> None:
    (place / "final.pt").unlink()
    os.mkfifo(place / "final.pt")


def packed(place: Path) -> None:
    with zipfile.ZipFile(place / "final.pt") as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(place / "final.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in members.items():
            new.writestr(name, data)


def code(place: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("touch /tmp/hsj-must-not-exist",)

    torch.save(Evil(), place / "final.pt")


def view(place: Path) -> None:
    torch.save(states(IDS, 3).T.contiguous().T, place / "final.pt")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (a_link, Reject.UNSAFE),
        (a_fifo, Reject.UNSAFE),
        (packed, Reject.MALFORMED),
        (code, Reject.MALFORMED),
        (view, Reject.MALFORMED),
        (lambda p: (p / "final.pt").write_bytes(b""), Reject.MALFORMED),
        (lambda p: (p / "aux_1.pt").unlink(), Reject.MALFORMED),
        (lambda p: (p / "psm").touch(), Reject.MALFORMED),
        (lambda p: (p / "meta.json").write_bytes(b'{"num_tokens": NaN}'), Reject.MALFORMED),
        (lambda p: (p / "meta.json").write_bytes(b" " * (2 << 20)), Reject.MALFORMED),
        (lambda p: (p / "meta.json").write_text(json.dumps({"num_tokens": 19})), Reject.WRONG_COUNT),
        (lambda p: (p / "meta.json").write_text(json.dumps({"input_ids": [1, 2]})), Reject.WRONG_IDENTITY),
        (lambda p: torch.save(torch.zeros(20, 3, dtype=torch.int64), p / "final.pt"), Reject.WRONG_DTYPE),
        (lambda p: torch.save(torch.zeros(21, HIDDEN), p / "final.pt"), Reject.WRONG_SIZE),
        (lambda p: torch.save(torch.zeros(20), p / "aux_0.pt"), Reject.WRONG_SIZE),
    ],
)
def test_what_is_no_dump(root: tuple[Path, int], spoil: Callable[[Path], object], reason: Reject) -> None:
    folder, fd = root
    spoil(V1Server(folder).dump(IDS))
    with pytest.raises(DumpRejectedError) as caught:
        dumps.look(fd, "req_0")
    assert caught.value.reason is reason
    assert not Path("/tmp/hsj-must-not-exist").exists()


def test_only_directories_of_the_right_name_count(root: tuple[Path, int]) -> None:
    folder, fd = root
    for name in ("req_1", "req_01", "req_", "req_2x", "hsj-test-1-1-5"):
        (folder / name).mkdir()
    (folder / "req_5").symlink_to(folder / "req_1")
    (folder / "req_6").touch()
    assert list(dumps.names(fd)) == ["req_1"]


def found(name: str, count: int, began: float = 100.0, **more: object) -> Found:
    return Found(name, int(name[4:]), count, 8, "float32", ("final.pt",), (0,), began, **more)  # type: ignore[arg-type]


def awaited(row: int, count: int, *before: tuple[str, int], sent_at: float = 99.0) -> Awaited:
    return Awaited(f"hsj-test-{row}-1-{count}", count, "ids", sent_at, frozenset(before))


def test_one_candidate_on_either_side() -> None:
    decision = decide([found("req_1", 7), found("req_2", 8)], [awaited(1, 7), awaited(2, 8)], [])
    assert [(a.rid, f.name) for a, f in decision.taken] == [("hsj-test-1-1-7", "req_1"), ("hsj-test-2-1-8", "req_2")]
    assert (decision.refused, decision.foreign) == ((), ())


@pytest.mark.parametrize(
    ("item", "request_"),
    [
        (found("req_1", 7), awaited(1, 7, ("req_1", 1))),  # it lay there before
        (found("req_1", 7, began=50.0), awaited(1, 7)),  # begun before the send
        (found("req_1", 6), awaited(1, 7)),
        (found("req_1", 7, rid="another"), awaited(1, 7)),
        (found("req_1", 7, ids_sha256="others"), awaited(1, 7)),
    ],
)
def test_what_is_nobodys(item: Found, request_: Awaited) -> None:
    decision = decide([item], [request_], [])
    assert decision.taken == ()
    assert len(decision.foreign) == 1


def test_two_for_one_request_are_both_refused() -> None:
    decision = decide([found("req_1", 7), found("req_2", 7)], [awaited(1, 7)], [])
    assert decision.taken == ()
    assert [a.rid for a, _ in decision.refused] == ["hsj-test-1-1-7"]
    assert len(decision.foreign) == 2


def test_a_late_one_is_its_own_requests_and_one_that_could_be_two_is_nobodys() -> None:
    late = awaited(1, 7)
    assert decide([found("req_1", 7)], [], [late]).taken == ((late, found("req_1", 7)),)
    both = decide([found("req_1", 7)], [awaited(2, 7)], [late])
    assert both.taken == ()
    assert len(both.refused) == 2
