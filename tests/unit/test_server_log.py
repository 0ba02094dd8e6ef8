"""The log of a server of our own: bounded in tmpfs, carried to the disk, without the key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hsjournal.server import logring
from hsjournal.server.logring import LogRing, carry, pieces, tail
from tests.helpers.mounts import tmpfs

KEY = "k3y-of-the-servers"


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    ring = LogRing(tmp_path / "ring")
    ring.write(b"one\ntwo")
    ring.write(b" three\n")
    assert tail(tmp_path / "ring") == "one\ntwo three\n"
    assert (tmp_path / "ring").stat().st_mode & 0o777 == 0o700


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logring, "PIECE_BYTES", 100)
    ring = LogRing(tmp_path)
    for number in range(200):
        ring.write(b"line %04d of this log\n" % number)
    assert sum(path.stat().st_size for _, path in pieces(tmp_path)) <= 100 * (logring.PIECES + 1) + 25
    assert tail(tmp_path, 60).endswith("line 0199 of this log\n")


def test_a_new_life_goes_on_in_it(tmp_path: Path) -> None:
    for word in (b"first\n", b"second\n"):
        ring = LogRing(tmp_path)
        ring.write(word)
        ring.close()
    assert tail(tmp_path) == "first\nsecond\n"


@pytest.mark.parametrize("cut", range(1, len(KEY) + 4))
def test_a_key_is_never_written_however_it_comes(tmp_path: Path, cut: int) -> None:
    text = f"key={KEY}\nand again {KEY}".encode()
    ring = LogRing(tmp_path, [KEY])
    for start in range(0, len(text), cut):
        ring.write(text[start : start + cut])
    ring.close()
    assert tail(tmp_path) == "key=***\nand again ***"


def test_a_key_in_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logring, "_MOST_HELD", 64)
    ring = LogRing(tmp_path, [KEY])
    for _ in range(20):
        ring.write(b"x" * 50 + KEY.encode() + b"y")
    ring.close()
    found = tail(tmp_path, 1 << 20)
    assert KEY not in found
    assert found.count("***") == 20
    assert found.count("x") == 20 * 50


def test_it_is_carried_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logring, "PIECE_BYTES", 50)
    ring, file, wanted = LogRing(tmp_path / "ring"), tmp_path / "logs" / "server.log", b""
    for number in range(40):
        line = b"line %d\n" % number
        ring.write(line)
        wanted += line
        if number % 7 == 0:
            carry(tmp_path / "ring", file)
    carry(tmp_path / "ring", file)
    assert carry(tmp_path / "ring", file) == 0
    assert file.read_bytes() == wanted


def test_what_the_disk_was_too_late_for_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logring, "PIECE_BYTES", 20)
    ring, file = LogRing(tmp_path / "ring"), tmp_path / "server.log"
    ring.write(b"first\n")
    carry(tmp_path / "ring", file)
    for number in range(50):
        ring.write(b"a line that is long %d\n" % number)
    carry(tmp_path / "ring", file)
    text = file.read_text()
    assert text.startswith("first\n")
    assert "pieces of this log were dropped" in text
    assert text.endswith("a line that is long 49\n")


def test_the_file_on_the_disk_is_turned_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logring, "_FILE_BYTES", 10)
    ring, file = LogRing(tmp_path / "ring"), tmp_path / "server.log"
    for number in range(8):
        ring.write(b"part %d and more\n" % number)
        carry(tmp_path / "ring", file)
    assert sorted(p.name for p in tmp_path.glob("server.log*")) == [
        "server.log", "server.log.1", "server.log.2", "server.log.3",
    ]  # fmt: skip
    assert file.read_text() == "part 7 and more\n"


def test_it_runs_alone(tmp_path: Path) -> None:
    LogRing(tmp_path / "ring").write(b"word\n")
    command = [sys.executable, "-I", "-S", logring.__file__, str(tmp_path / "ring"), str(tmp_path / "file")]
    subprocess.run(command, check=True, timeout=30)
    assert (tmp_path / "file").read_text() == "word\n"


def test_a_full_tmpfs_costs_lines_and_no_wait(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "64k") as small:
        ring = LogRing(small / "ring")
        for _ in range(100):
            ring.write(b"x" * 1023 + b"\n")
        for _, path in pieces(small / "ring"):
            path.write_bytes(b"")
        ring.write(b"there is room again\n")
        text = tail(small / "ring")
    assert "found no room in tmpfs" in text
    assert text.endswith("there is room again\n")
