"""The mirror: what a run says about itself, whole or not at all, and never in the way of its work."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hsjournal import mirror as module
from hsjournal.birth import own_create_time
from hsjournal.events import Event
from hsjournal.mirror import (
    EVENTS,
    HEARTBEAT,
    MAX_SLOTS,
    SNAPSHOT,
    Heartbeat,
    Mirror,
    Phase,
    Slot,
    machine_boot_id,
    read_heartbeat,
)
from tests.helpers.mounts import fill, tmpfs


@pytest.fixture
def mirror(tmp_path):
    made = Mirror(tmp_path / "hsjournal-0" / "abc" / "mirror")
    made.create()
    return made


# the heartbeat


def test_a_heartbeat_comes_back_as_it_was_sent(mirror):
    heart = Heartbeat(mirror.folder, epoch=7)
    before = time.monotonic()
    heart.phase(Phase.RUNNING)
    heart.slot(3, 2**40, 5, Phase.WRITING, 2**41)
    heart.slot(MAX_SLOTS - 1, 0, 1, Phase.VERIFYING)
    beat = read_heartbeat(mirror.folder)
    assert beat is not None
    assert (beat.pid, beat.epoch, beat.phase) == (os.getpid(), 7, Phase.RUNNING)
    assert beat.create_time == own_create_time()
    assert before <= beat.beat <= time.monotonic()
    first, second = beat.slots
    assert first == Slot(2**40, 5, Phase.WRITING, 2**41, first.since)
    assert (second.row, second.phase) == (0, Phase.VERIFYING)
    assert before <= first.since <= second.since <= time.monotonic()
    heart.slot(3, -1, 0, Phase.IDLE)
    assert [s.row for s in read_heartbeat(mirror.folder).slots] == [0]  # type: ignore[union-attr]


def test_a_fresh_heartbeat_has_no_rows_and_replaces_the_old_one_at_once(mirror):
    old = Heartbeat(mirror.folder, epoch=1)
    old.slot(1, 9, 1, Phase.WRITING)
    Heartbeat(mirror.folder, epoch=2)
    old.slot(1, 10, 1, Phase.WRITING)  # a stuck worker that wakes up writes into nobody's record
    beat = read_heartbeat(mirror.folder)
    assert beat is not None
    assert (beat.epoch, beat.slots, beat.phase) == (2, (), Phase.STARTING)
    assert [p.name for p in mirror.folder.iterdir()] == [HEARTBEAT]


def test_there_is_none_of_another_boot_of_the_machine(mirror, monkeypatch):
    Heartbeat(mirror.folder, epoch=1)
    assert len(machine_boot_id()) == 16
    monkeypatch.setattr(module, "machine_boot_id", lambda: b"\0" * 16)
    assert read_heartbeat(mirror.folder) is None


@pytest.mark.parametrize("length", [0, 1, 64, 128, 4000])
def test_a_torn_one_is_none(mirror, length):
    Heartbeat(mirror.folder, epoch=1)
    path = mirror.folder / HEARTBEAT
    path.write_bytes(path.read_bytes()[:length])
    assert read_heartbeat(mirror.folder) is None


@pytest.mark.parametrize("offset", [0, 8, 56, 128 + 16])
def test_one_with_values_that_are_none_is_none(mirror, offset):
    heart = Heartbeat(mirror.folder, epoch=1)
    heart.slot(0, 1, 1, Phase.WRITING)
    with (mirror.folder / HEARTBEAT).open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack("<i", 12345))
    assert read_heartbeat(mirror.folder) is None


def test_a_missing_folder_has_none(tmp_path):
    assert read_heartbeat(tmp_path / "nowhere") is None


def test_it_outlives_its_writer_however_that_ends(mirror):
    code = (
        "import os; from pathlib import Path; from hsjournal.mirror import *\n"
        f"heart = Heartbeat(Path({str(mirror.folder)!r}), 4)\n"
        "heart.slot(2, 77, 1, Phase.SYNCING, 123); os.kill(os.getpid(), 9)"
    )
    child = subprocess.run([sys.executable, "-c", code], check=False)
    assert child.returncode == -signal.SIGKILL
    beat = read_heartbeat(mirror.folder)
    assert beat is not None
    assert [(s.row, s.phase, s.nbytes) for s in beat.slots] == [(77, Phase.SYNCING, 123)]


def test_a_reader_beside_a_busy_writer_never_sees_half_a_number(mirror):
    """Rows jump between -1 and a number of many bytes: half of each would be a third number."""
    code = (
        "from pathlib import Path; from hsjournal.mirror import *\n"
        f"heart = Heartbeat(Path({str(mirror.folder)!r}), 4)\n"
        "print(flush=True)\n"
        "while True:\n"
        "    heart.slot(1, 0x0102030405060708, 3, Phase.WRITING, 0x0102030405060708)\n"
        "    heart.slot(1, -1, 0, Phase.IDLE, 0)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        seen = set()
        for _ in range(20_000):
            beat = read_heartbeat(mirror.folder)
            assert beat is not None
            seen |= {s.row for s in beat.slots}
        assert seen == {0x0102030405060708}
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.root
def test_a_worker_starts_on_a_full_tmpfs(tmp_path):
    """FAULTS C2: full of dumps that this very worker is to clear away."""
    with tmpfs(tmp_path / "small", "1m") as mount:
        mirror = Mirror(mount / "hsjournal-0" / "abc" / "mirror")
        mirror.create()
        filler = fill(mount)
        unseen = Heartbeat(mirror.folder, epoch=1)
        unseen.slot(1, 2, 3, Phase.WRITING)  # no SIGBUS
        assert read_heartbeat(mirror.folder) is None
        assert list(mirror.folder.iterdir()) == []
        filler.unlink()
        Heartbeat(mirror.folder, epoch=2).slot(1, 5, 1, Phase.WRITING)
        fill(mount)
        Heartbeat(mirror.folder, epoch=3)  # in the room of the one before
        beat = read_heartbeat(mirror.folder)
        assert beat is not None
        assert (beat.epoch, beat.slots) == (3, ())


# files


def test_a_file_is_replaced_whole(mirror):
    assert mirror.read(SNAPSHOT) is None
    assert mirror.write(SNAPSHOT, {"a": 1, "odd": Path("x"), "name": "\udcff☃"})
    assert mirror.read(SNAPSHOT) == {"a": 1, "odd": "x", "name": "\udcff☃"}
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            mirror.write(SNAPSHOT, {"n": number, "padding": "x" * (number % 7000)})
            number += 1

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2000):
            assert mirror.read(SNAPSHOT) is not None
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert [p.name for p in mirror.folder.iterdir()] == [SNAPSHOT]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b'"words"'])
def test_what_is_not_whole_is_none(mirror, content):
    (mirror.folder / SNAPSHOT).write_bytes(content)
    assert mirror.read(SNAPSHOT) is None


def test_a_mirror_that_was_swept_away_stops_nobody(mirror):
    for path in (mirror.folder, mirror.folder.parent, mirror.folder.parent.parent):
        path.rmdir()
    assert not mirror.write(SNAPSHOT, {})
    mirror.record(Event("one"))
    assert mirror.read(SNAPSHOT) is None
    assert mirror.events() == []
    mirror.create()
    mirror.record(Event("two"))
    assert [e.kind for _, e in mirror.events()] == ["one", "two"]


# events


def test_events_come_back_in_order_with_their_keys(mirror):
    sent = [Event("one", 3, {"why": "a\nb\u2028c", "n": [1, {"x": None}]}, at=1.5, epoch=2), Event("two")]
    keys = [mirror.record(event) for event in sent]
    assert mirror.events() == list(zip(keys, sent, strict=True))
    assert len(set(keys)) == 2
    assert mirror.events(1) == [(keys[1], sent[1])]
    assert json.loads((mirror.folder / EVENTS).read_text().split("\n")[0].partition(" ")[2])["kind"] == "one"


def test_a_torn_line_costs_only_itself(mirror):
    mirror.record(Event("one"))
    with (mirror.folder / EVENTS).open("ab") as file:
        file.write(b'0123456789abcdef0123456789abcdef {"at": 1.0, "ki')  # a death in the middle of a write
    mirror.record(Event("two"))
    with (mirror.folder / EVENTS).open("ab") as file:
        file.write(b"\xff\xfe garbage\n\n[1]\n" + b"k" * 32 + b' {"strange": 1}\n')
    mirror.record(Event("three"))
    assert [e.kind for _, e in mirror.events()] == ["one", "two", "three"]


def test_the_tail_is_read_from_the_end(mirror):
    for number in range(2000):
        mirror.record(Event("e", number, {"padding": "x" * 300}))
    assert [e.row for _, e in mirror.events(5)] == list(range(1995, 2000))
    with (mirror.folder / EVENTS).open("r+b") as file:
        file.write(bytes(400_000))  # all but the end
    assert [e.row for _, e in mirror.events(5)] == list(range(1995, 2000))


def test_the_file_is_turned_over_and_the_last_events_stay(mirror, monkeypatch):
    monkeypatch.setattr(module, "MAX_EVENTS_BYTES", 20_000)
    for number in range(1000):
        mirror.record(Event("e", number, {"padding": "x" * 100}))
    rows = [e.row for _, e in mirror.events()]
    assert rows == list(range(rows[0] or 0, 1000))
    assert 100 < len(rows) < 300
    assert sum(p.stat().st_size for p in mirror.folder.iterdir()) < 50_000
    assert [e.row for _, e in mirror.events(150)] == list(range(850, 1000))


def test_two_processes_lose_no_recent_event_by_turning_over(mirror):
    code = (
        "import sys; from pathlib import Path; from hsjournal import mirror; from hsjournal.events import Event\n"
        "mirror.MAX_EVENTS_BYTES = 60_000\n"
        f"m = mirror.Mirror(Path({str(mirror.folder)!r}))\n"
        "for n in range(600): m.record(Event(sys.argv[1], n, {'padding': 'x' * 100}))"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, name]) for name in ("a", "b")]
    assert [child.wait() for child in children] == [0, 0]
    found = [e for _, e in mirror.events()]
    assert len(found) > 200  # at least one whole file's worth: no fresh file replaced the turned one
    for name in "ab":
        rows = [e.row for e in found if e.kind == name]
        assert rows == list(range(600 - len(rows), 600))


def test_a_writer_that_is_stopped_in_the_middle_holds_nobody_up(mirror):
    code = (
        "import fcntl, os, signal\n"
        f"fd = os.open({str(mirror.folder)!r}, os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_EX); print(flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    begin = time.monotonic()
    mirror.record(Event("one"))
    assert time.monotonic() - begin < 1
    assert len(mirror.events()) == 1
    child.kill()
    child.wait()
    child.stdout.close()


@pytest.mark.root
def test_events_wait_for_room(tmp_path):
    with tmpfs(tmp_path / "small", "1m") as mount:
        mirror = Mirror(mount / "hsjournal-0" / "abc" / "mirror")
        mirror.create()
        mirror.record(Event("before"))
        filler = fill(mount)
        for number in range(50):
            mirror.record(Event("waiting", number, {"padding": "x" * 500}))
        assert not mirror.write(SNAPSHOT, {"x": "y" * 5000})
        assert len(mirror.events()) < 51
        filler.unlink()
        mirror.record(Event("after"))
        found = [e for _, e in mirror.events()]
        assert [e.kind for e in found] == ["before"] + ["waiting"] * 50 + ["after"]
        assert [e.row for e in found[1:-1]] == list(range(50))
        assert sorted(p.name for p in mirror.folder.iterdir()) == [EVENTS]


# whose folder it is


def test_the_folder_is_private_and_made_once(mirror):
    for place in (mirror.folder, mirror.folder.parent, mirror.folder.parent.parent):
        assert place.stat().st_mode & 0o777 == 0o700
    mirror.create()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_another_users_folder_is_refused(tmp_path, depth):
    if os.geteuid() != 0:
        pytest.skip("giving a folder away needs root")
    mirror = Mirror(tmp_path / "hsjournal-0" / "abc" / "mirror")
    place = [mirror.folder.parent.parent, mirror.folder.parent, mirror.folder][depth]
    place.mkdir(parents=True)
    os.chown(place, 65534, 65534)
    with pytest.raises(PermissionError, match="not a folder of this user"):
        mirror.create()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_link_in_the_way_is_refused(tmp_path, depth):
    mirror = Mirror(tmp_path / "hsjournal-0" / "abc" / "mirror")
    place = [mirror.folder.parent.parent, mirror.folder.parent, mirror.folder][depth]
    place.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        mirror.create()
    assert list((tmp_path / "elsewhere").iterdir()) == []
