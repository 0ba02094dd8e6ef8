from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hsjournal.dump.expect import Expectation
from hsjournal.dump.protocol import MAX_META_BYTES, CaptureFailure, FailureReason, RequestId, token_ids_sha256
from hsjournal.dump.reader import list_root, open_dump, open_root, read_failure
from hsjournal.errors import DumpRejectedError, Reject
from tests.helpers.dumps import BOOT_ID, random_ids, write_dump, write_failure

N = 7
RID = RequestId.sample("abcd", 3, 1, N)
IDS = random_ids(N)
EXPECT = Expectation(RID, N, 64, "bfloat16", (1, 3, 5), "post", token_ids_sha256(IDS), BOOT_ID)


@pytest.fixture
def root_fd(tmp_path):
    fd = open_root(tmp_path)
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def no_descriptor_leaks(root_fd):
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def rejection(root_fd: int, expect: Expectation = EXPECT) -> DumpRejectedError:
    with pytest.raises(DumpRejectedError) as caught, open_dump(root_fd, expect.rid, expect):
        pass
    return caught.value


def test_a_good_dump_opens_with_its_files_in_the_protocols_order(tmp_path, root_fd):
    made = write_dump(tmp_path, RID, IDS)
    with open_dump(root_fd, RID, EXPECT) as dump:
        assert dump.meta == made.meta
        for fd, array in zip(dump.fds, made.arrays.values(), strict=True):
            assert os.pread(fd, 1 << 20, 0) == array.tobytes()


def test_any_boot_is_taken_when_none_is_asked_for(tmp_path, root_fd):
    write_dump(tmp_path, RID, IDS, boot_id="another life")
    assert rejection(root_fd).reason is Reject.STALE_BOOT
    with open_dump(root_fd, RID, Expectation(**{**asdict(EXPECT), "rid": RID, "boot_id": None})):
        pass


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"token_ids_sha256": "0" * 64}, Reject.WRONG_IDENTITY, "digest of the token ids"),
        ({"num_tokens": 9}, Reject.WRONG_COUNT, "9 of 7 rows: a request that was retracted"),
        ({"num_tokens": 6}, Reject.WRONG_COUNT, "6 of 7 rows: the server cut the prompt"),
        ({"num_tokens": 5, "chunks": (0, 2)}, Reject.WRONG_COUNT, "a chunk of a chunked prefill"),
        ({"capture_layers": (1, 3)}, Reject.WRONG_LAYERS, "2 instead of 3"),
        ({"capture_layers": (2, 4, 6)}, Reject.WRONG_LAYERS, "off by one, the other convention"),
        ({"capture_layers": (1, 3, 6)}, Reject.WRONG_LAYERS, "[1, 3, 6]"),
        ({"dtype": "float16"}, Reject.WRONG_DTYPE, "float16"),
        ({"hidden_size": 65}, Reject.WRONG_HIDDEN, "65 wide"),
        ({"final_norm": "pre"}, Reject.WRONG_NORM, "pre-norm"),
    ],
)
def test_a_consistent_dump_that_is_not_the_one_expected(tmp_path, root_fd, change, reason, words):
    write_dump(tmp_path, RID, IDS, **change)
    error = rejection(root_fd)
    assert error.reason is reason
    assert words in error.detail


def test_a_lost_chunk_names_the_likely_cause_and_both_counts(tmp_path, root_fd):
    rid = RequestId.sample("abcd", 3, 1, 20_000)
    ids = random_ids(20_000)
    write_dump(tmp_path, rid, ids, hidden=1, num_tokens=2_000)
    error = rejection(
        root_fd, Expectation(rid, 20_000, 1, "bfloat16", (1, 3, 5), "post", token_ids_sha256(ids), BOOT_ID)
    )
    assert error.detail == "the server returned 2,000 of 20,000 rows: chunked prefill or a prefix cache hit"


def _meta(tmp: Path, **change: Any) -> None:
    raw = json.loads((tmp / "meta.json").read_text())
    (tmp / "meta.json").write_text(json.dumps(raw | change))


def _raw(old: str, new: str):
    def edit(tmp: Path) -> None:
        text = (tmp / "meta.json").read_text()
        assert old in text
        (tmp / "meta.json").write_text(text.replace(old, new, 1))

    return edit


def _link(name: str):
    def edit(tmp: Path) -> None:
        outside = tmp.parent / "outside"
        (tmp / name).rename(outside)
        (tmp / name).symlink_to(outside)

    return edit


def _fifo(name: str):
    def edit(tmp: Path) -> None:
        (tmp / name).unlink()
        os.mkfifo(tmp / name)

    return edit


def _socket(tmp: Path) -> None:
    (tmp / "final.bin").unlink()
    place = socket.socket(socket.AF_UNIX)
    here = os.open(tmp, os.O_RDONLY)
    place.bind(f"/proc/self/fd/{here}/final.bin")
    os.close(here)
    place.close()


def _directory(tmp: Path) -> None:
    (tmp / "aux_0.bin").unlink()
    (tmp / "aux_0.bin").mkdir()


HOSTILE = {
    "a link to a tensor": (_link("aux_1.bin"), Reject.UNSAFE, "aux_1.bin is a link"),
    "a link to meta": (_link("meta.json"), Reject.UNSAFE, "meta.json is a link"),
    "a link for done": (_link("done"), Reject.UNSAFE, "done is a link"),
    "a fifo for a tensor": (_fifo("final.bin"), Reject.UNSAFE, "final.bin is not a regular file"),
    "a fifo for meta": (_fifo("meta.json"), Reject.UNSAFE, "meta.json"),
    "a socket": (_socket, Reject.UNSAFE, "final.bin"),
    "a directory for a tensor": (_directory, Reject.UNSAFE, "aux_0.bin is not a regular file"),
    "no done": (lambda tmp: (tmp / "done").unlink(), Reject.MALFORMED, "done is missing"),
    "a done with content": (lambda tmp: (tmp / "done").write_text("x"), Reject.MALFORMED, "done"),
    "no meta": (lambda tmp: (tmp / "meta.json").unlink(), Reject.MALFORMED, "meta.json is missing"),
    "an aux file less": (lambda tmp: (tmp / "aux_2.bin").unlink(), Reject.MALFORMED, "'aux_2.bin' is missing"),
    "an aux file more": (lambda tmp: (tmp / "aux_3.bin").touch(), Reject.MALFORMED, "'aux_3.bin' is one too many"),
    "no final": (lambda tmp: (tmp / "final.bin").unlink(), Reject.MALFORMED, "'final.bin' is missing"),
    "a strange file": (lambda tmp: (tmp / "core").touch(), Reject.MALFORMED, "'core' is one too many"),
    "a thousand files": (
        lambda tmp: [(tmp / f"f{i}").touch() for i in range(1000)],
        Reject.MALFORMED,
        "more than 256 names",
    ),
    "a row less": (
        lambda tmp: os.truncate(tmp / "aux_1.bin", 6 * 128),
        Reject.WRONG_SIZE,
        "aux_1.bin is 768 bytes (6.00 rows)",
    ),
    "a byte more": (lambda tmp: os.truncate(tmp / "final.bin", 897), Reject.WRONG_SIZE, "final.bin is 897 bytes"),
    "huge meta": (
        lambda tmp: os.truncate(tmp / "meta.json", MAX_META_BYTES + 1),
        Reject.MALFORMED,
        "more than 1,048,576",
    ),
    "meta that is no JSON": (lambda tmp: (tmp / "meta.json").write_text("{"), Reject.MALFORMED, "meta.json"),
    "meta that is no UTF-8": (
        lambda tmp: (tmp / "meta.json").write_bytes(b'{"a":"\xff"}'),
        Reject.MALFORMED,
        "meta.json",
    ),
    "meta as a list": (lambda tmp: (tmp / "meta.json").write_text("[]"), Reject.MALFORMED, "not a JSON object"),
    "nested meta": (lambda tmp: (tmp / "meta.json").write_text("[" * 200_000), Reject.MALFORMED, "meta.json"),
    "NaN": (_raw('"num_tokens":7', '"num_tokens":NaN'), Reject.MALFORMED, "NaN is not JSON"),
    "a key twice": (_raw('"num_tokens":7', '"num_tokens":7,"num_tokens":7'), Reject.MALFORMED, "a key stands twice"),
    "a huge integer": (_raw('"num_tokens":7', '"num_tokens":' + "9" * 5000), Reject.MALFORMED, "meta.json"),
    "a float count": (_raw('"num_tokens":7', '"num_tokens":7.0'), Reject.MALFORMED, "num_tokens"),
    "another request's meta": (
        lambda tmp: _meta(tmp, rid="hsj-abcd-4-1-7"),
        Reject.WRONG_IDENTITY,
        "speaks of 'hsj-abcd-4-1-7'",
    ),
    "another schema": (lambda tmp: _meta(tmp, schema="hsjournal/v9"), Reject.MALFORMED, "hsjournal/v9"),
    "a path for a file": (_raw('"aux_0.bin"', '"../../etc/passwd"'), Reject.MALFORMED, "tensors do not follow"),
    "an absolute path": (_raw('"final.bin"', '"/etc/passwd"'), Reject.MALFORMED, "tensors do not follow"),
    "an unknown dtype": (_raw('"bfloat16"', '"float64"'), Reject.MALFORMED, "dtype"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_dumps_are_rejected_by_name(tmp_path, root_fd, case):
    edit, reason, words = HOSTILE[case]
    write_dump(tmp_path, RID, IDS, edit=edit)
    error = rejection(root_fd)
    assert error.reason is reason
    assert words in error.detail


def test_a_link_in_place_of_the_directory_is_unsafe(tmp_path, root_fd):
    other = tmp_path / "elsewhere"
    other.mkdir()
    (tmp_path / str(RID)).symlink_to(write_dump(other, RID, IDS).path)
    assert rejection(root_fd).reason is Reject.UNSAFE


def test_a_missing_directory_has_vanished(root_fd):
    assert rejection(root_fd).reason is Reject.VANISHED


def test_a_directory_that_is_removed_while_it_is_open_has_vanished(tmp_path, root_fd, monkeypatch):
    write_dump(tmp_path, RID, IDS)
    real = os.open

    def late(path, flags, *args, **kwargs):
        if path == "aux_1.bin":
            (tmp_path / str(RID) / "aux_1.bin").unlink()
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", late)
    assert rejection(root_fd).reason is Reject.VANISHED


def test_the_root_must_be_a_directory_and_no_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError):
        open_root(tmp_path / "link")
    with pytest.raises(OSError):
        open_root(tmp_path / "none")


def test_a_failure_is_read_and_checked(tmp_path, root_fd):
    failure = CaptureFailure(str(RID), FailureReason.NO_ROOM, "3 MB short", BOOT_ID)
    assert read_failure(root_fd, RID) is None
    write_failure(tmp_path, RID, failure)
    assert read_failure(root_fd, RID) == failure
    assert "failed capture" in rejection(root_fd).detail


def test_a_complete_dump_is_no_failure(tmp_path, root_fd):
    write_dump(tmp_path, RID, IDS)
    assert read_failure(root_fd, RID) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * (1 << 15)])
def test_a_broken_failure_is_malformed(tmp_path, root_fd, content):
    folder = tmp_path / str(RID)
    folder.mkdir()
    (folder / "error").write_bytes(content)
    with pytest.raises(DumpRejectedError) as caught:
        read_failure(root_fd, RID)
    assert caught.value.reason is Reject.MALFORMED


def test_a_failure_of_another_request_is_refused(tmp_path, root_fd):
    write_failure(tmp_path, RID, CaptureFailure("hsj-abcd-9-1-7", FailureReason.NO_ROOM, "", BOOT_ID))
    with pytest.raises(DumpRejectedError) as caught:
        read_failure(root_fd, RID)
    assert caught.value.reason is Reject.WRONG_IDENTITY


def test_the_root_is_listed_by_kind(tmp_path, root_fd):
    write_dump(tmp_path, RID, IDS)
    write_dump(tmp_path, RequestId.sample("abcd", 4, 1, N), IDS, publish=False)
    write_failure(tmp_path, RequestId.for_probe("abcd", 1, N), CaptureFailure("", FailureReason.NO_ROOM, "", BOOT_ID))
    write_dump(tmp_path, RequestId.sample("abcd", 5, 1, N), IDS, edit=lambda tmp: (tmp / "done").unlink())
    write_dump(tmp_path, RequestId.sample("other", 5, 1, N), IDS)
    (tmp_path / "psm_1234").touch()
    (tmp_path / "req_22391").mkdir()
    (tmp_path / "hsj-abcd-9-1-7").touch()  # a file, not a directory
    (tmp_path / "hsj-abcd-09-1-7").mkdir()  # not the grammar
    (tmp_path / "hsj-abcd-10-1-7").symlink_to(tmp_path / str(RID))
    kinds = {entry.name: entry.kind for entry in list_root(root_fd, "abcd")}
    assert kinds == {
        "hsj-abcd-3-1-7": "dump",
        ".tmp-hsj-abcd-4-1-7": "tmp",
        "hsj-abcd-p1-7": "failure",
        "hsj-abcd-5-1-7": "partial",
        "hsj-other-5-1-7": "foreign",
        "psm_1234": "foreign",
        "req_22391": "foreign",
        "hsj-abcd-9-1-7": "foreign",
        "hsj-abcd-09-1-7": "foreign",
        "hsj-abcd-10-1-7": "foreign",
    }
    assert {e.name: e.kind for e in list_root(root_fd)}["hsj-other-5-1-7"] == "dump"
