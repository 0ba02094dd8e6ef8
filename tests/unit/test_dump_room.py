from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from hsjournal.dump.room import Room, memory_rooms

MB = 1 << 20


def test_reservations_count_against_the_budget(tmp_path):
    room = Room(tmp_path, 100, margin_bytes=0)
    assert room.capacity() == 100
    assert room.reserve("a", 60)
    assert not room.reserve("b", 41)
    assert room.reserve("b", 40)
    assert room.available() == 0
    assert room.reserve("a", 60)  # has it already
    room.release("a")
    room.release("a")
    assert room.available() == 60
    assert room.reserve("late", 1000, force=True)  # a dump found lying there counts, fit or not
    assert room.available() == 0
    assert room.reserved == 1040


def test_the_file_systems_free_space_binds_and_a_landed_dump_is_not_counted_twice(tmp_path, monkeypatch):
    class Found:
        f_frsize, f_blocks, f_bavail = 1, 1000, 500

    monkeypatch.setattr(os, "statvfs", lambda _: Found)
    room = Room(tmp_path, 10_000, margin_bytes=100)
    assert room.capacity() == 900
    assert room.available() == 400
    assert room.reserve("a", 300)
    assert room.available() == 100
    Found.f_bavail = 200  # its dump has arrived
    assert room.available() == 0
    room.landed("a")
    assert room.available() == 100
    room.release("a")
    Found.f_bavail = 500
    assert room.available() == 400


def test_a_root_that_is_gone_is_an_error_not_room(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    room = Room(root, 100, margin_bytes=0)
    root.rmdir()
    with pytest.raises(FileNotFoundError):
        room.available()


def _tree(base: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)


def test_every_level_of_cgroup_v2_binds(tmp_path):
    _tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB\n",
            "proc/self/cgroup": "0::/pod/box\n",
            "cg/pod/box/memory.max": "max\n",
            "cg/pod/box/memory.current": "77\n",
            "cg/pod/memory.max": "1000\n",
            "cg/pod/memory.current": "900\n",
            "cg/pod/memory.stat": "anon 5\ninactive_file 300\n",
        },
    )
    assert memory_rooms(tmp_path / "proc", tmp_path / "cg") == [50 * 1024, 400]


def test_a_cgroup_namespace_hides_the_path(tmp_path):
    _tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../outside/x\n",
            "cg/memory.max": "500",
            "cg/memory.current": "100",
        },
    )
    assert memory_rooms(tmp_path / "proc", tmp_path / "cg") == [400]


def test_cgroup_v1(tmp_path):
    _tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/box\n9:memory:/box\n",
            "cg/memory/box/memory.limit_in_bytes": "2000",
            "cg/memory/box/memory.usage_in_bytes": "1500",
            "cg/memory/box/memory.stat": "total_inactive_file 100\n",
            "cg/memory/memory.limit_in_bytes": "9223372036854771712",
            "cg/memory/memory.usage_in_bytes": "5",
        },
    )
    assert memory_rooms(tmp_path / "proc", tmp_path / "cg") == [600]


def test_memory_binds_in_tmpfs_only(tmp_path):
    _tree(tmp_path, {"proc/meminfo": f"MemAvailable: {10 * 1024} kB\n", "proc/self/cgroup": ""})
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        room = Room(folder, 1 << 40, margin_bytes=MB, proc=tmp_path / "proc", cgroups=tmp_path / "none")
        assert room.available() == 9 * MB
        assert room.reserve("a", 4 * MB)
        assert room.available() == 5 * MB
    finally:
        shutil.rmtree(folder)
    on_disk = Room(tmp_path, 50 * MB, margin_bytes=0, proc=tmp_path / "proc", cgroups=tmp_path / "none")
    assert on_disk.available() == 50 * MB


def test_threads_never_reserve_more_than_there_is(tmp_path):
    room = Room(tmp_path, 1000, margin_bytes=0)
    won: list[str] = []

    def grab(name: str) -> None:
        won.extend(f"{name}-{i}" for i in range(50) if room.reserve(f"{name}-{i}", 10))

    threads = [threading.Thread(target=grab, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 100
    assert room.reserved == 1000


def test_a_file_system_that_was_full_is_remembered_for_a_while(tmp_path, monkeypatch):
    room = Room(tmp_path, 1 << 30, 0)
    room.available()
    assert not room.was_full(1e9)
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((real[0], real[1], real[2], 3, 3, *real[5:]))
    for see in (Room.available, lambda full: full.was_full(60)):
        monkeypatch.setattr("os.statvfs", lambda _: full)
        see(room)
        monkeypatch.undo()
        assert room.was_full(60)
        assert not room.was_full(0)
        room = Room(tmp_path, 1 << 30, 0)
