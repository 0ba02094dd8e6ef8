"""doctor: each answer names what it saw and, unless it is well, what to do."""

from __future__ import annotations

import errno
import json
import os
import pwd
import resource
import stat
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hsjournal.birth import own_create_time
from hsjournal.config import MORE_SERVERS, RunPaths
from hsjournal.dump import room
from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.ops.doctor import handover, machine, runs, server, storage
from hsjournal.ops.doctor.examination import Subject, examine
from hsjournal.ops.doctor.lines import Level, Line
from hsjournal.states import State
from tests.helpers.mounts import tmpfs
from tests.helpers.runs import make_run

ROOT = Path("/somewhere/root")


def levels(lines: list[Line]) -> set[Level]:
    return {line.level for line in lines}


def the(lines: list[Line], word: str) -> Line:
    found = [line for line in lines if word in line.words]
    assert len(found) == 1, [line.words for line in lines]
    return found[0]


def test_every_line_that_is_not_well_has_a_remedy(tmp_path: Path) -> None:
    lines = [*machine.examine(), *storage.examine("output", tmp_path, 1 << 60), *handover.examine(tmp_path, 1 << 30, 0)]
    assert all(bool(line.remedy) == (line.level is not Level.OK) for line in lines)
    assert [Line.from_json(json.loads(json.dumps(line.to_json()))) for line in lines] == lines


@pytest.mark.parametrize(
    ("soft", "hard", "level", "remedy"),
    [
        (1024, 1024, Level.WARN, "limits.conf"),
        (1024, 1 << 20, Level.WARN, "ulimit -n 4096"),
        (4096, 4096, Level.OK, ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, Level.OK, ""),
    ],
)
def test_open_files(soft: int, hard: int, level: Level, remedy: str) -> None:
    line = machine.open_files(soft, hard)
    assert line.level is level
    assert remedy in line.remedy


def test_a_gpu_tool_that_hangs_or_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tool(body: str) -> str:
        path = tmp_path / "smi"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    assert "NVIDIA H200, 143771 MiB" in machine.gpus(tool("echo 'NVIDIA H200, 143771 MiB, 3 MiB, 0 %'")).words
    assert machine.gpus(tool("echo 'No devices were found'; exit 6")).level is Level.WARN
    monkeypatch.setattr(machine, "_GPU_DEADLINE", 0.2)
    assert "did not answer" in machine.gpus(tool("exec sleep 20")).words
    assert machine.gpus("a-tool-that-is-not-there").level is Level.OK


def test_logout_deletes_shared_memory_of_users_only(tmp_path: Path) -> None:
    assert machine.shared_memory_after_logout(0, tmp_path, tmp_path).level is Level.OK
    assert machine.shared_memory_after_logout(1000, tmp_path, tmp_path).level is Level.WARN
    (tmp_path / "logind.conf").write_text("[Login]\nRemoveIPC=no\n")
    assert machine.shared_memory_after_logout(1000, tmp_path, tmp_path).level is Level.OK


def test_a_folder_still_to_be_made_is_examined_through_its_parent(tmp_path: Path) -> None:
    lines = list(storage.examine("output", tmp_path / "not" / "yet", 1000))
    assert Level.FAIL not in levels(lines)
    assert "1.0 kB needed" in the(lines, " free").words
    assert "ms" in the(lines, "fsync").words
    assert list(tmp_path.iterdir()) == []


def test_room_that_does_not_suffice(tmp_path: Path) -> None:
    line = the(list(storage.examine("output", tmp_path, 1 << 60)), "the rows still to come")
    assert line.level is Level.FAIL


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (line,) = storage.examine("output", tmp_path / "file" / "under", 0)
    assert line.level is Level.FAIL


@pytest.mark.root
def test_a_small_root_against_a_large_sample(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "shm", "80m") as mount:
        root = mount / "dumps"
        fits = list(handover.examine(root, 1 << 40, 1 << 20))
        tight = list(handover.examine(root, 1 << 40, 8 << 20))
        never = list(handover.examine(root, 1 << 40, 1 << 30))
    assert levels(fits) == {Level.OK}
    assert the(tight, "largest sample").level is Level.WARN
    assert the(never, "largest sample").level is Level.FAIL
    assert "--shm-size" in the(never, "largest sample").remedy


def test_whose_the_root_is(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(0o700)
    assert "mode 0700" in the(list(handover.examine(root, 1 << 30, 0)), "yours").words
    root.chmod(0o777 | stat.S_ISVTX)
    assert the(list(handover.examine(root, 1 << 30, 0)), "anybody").level is Level.FAIL
    link = tmp_path / "link"
    link.symlink_to(root)
    assert the(list(handover.examine(link, 1 << 30, 0)), "is a link").level is Level.FAIL
    (root / "holiday.jpg").write_text("")
    root.chmod(0o700)
    assert the(list(handover.examine(root, 1 << 30, 0)), "not ours").level is Level.WARN


def test_runs_that_only_take_room_are_told_from_those_that_live(tmp_path: Path) -> None:
    assert next(iter(runs.examine(tmp_path / "none"))).level is Level.OK
    own = {"pid": os.getpid(), "create_time": own_create_time()}
    for name, record in (("a", own), ("b", own | {"create_time": 1.0})):
        mirror = Mirror(tmp_path / "user" / name / "mirror")
        (tmp_path / "user").mkdir(mode=0o700, exist_ok=True)
        mirror.create()
        mirror.write(SUPERVISOR, record | {"run_dir": f"/runs/{name}", "beat": time.time()})
    lives, dead = runs.examine(tmp_path / "user")
    assert (lives.level, dead.level) == (Level.OK, Level.WARN)
    assert "hsjournal resume /runs/b" in dead.remedy


@pytest.mark.parametrize(
    ("info", "level", "word"),
    [
        ({}, Level.FAIL, "without hsjournal's capture plugin"),
        ({"hsjournal": {"refusal": "pipeline parallelism 2 is not supported"}}, Level.FAIL, "pipeline parallelism 2"),
        ({"hsjournal": {}, "disable_radix_cache": False}, Level.FAIL, "prefix cache"),
        ({"hsjournal": {}, "speculative_algorithm": "EAGLE3"}, Level.FAIL, "EAGLE3"),
        ({"hsjournal": {"handover_root": "/elsewhere"}}, Level.WARN, "/elsewhere"),
        ({"hsjournal": {"handover_root": str(ROOT), "capture_layers": [1, 5]}}, Level.OK, "layers 1, 5"),
    ],
)
def test_what_a_servers_settings_mean(info: dict[str, object], level: Level, word: str) -> None:
    assert the(list(server.judge("server", info, ROOT)), word).level is level


def test_a_server_that_is_not_there() -> None:
    (line,) = server.examine("http://127.0.0.1:1", ROOT)
    assert line.level is Level.FAIL
    assert "127.0.0.1:1" in line.words


def test_the_paths_of_a_run_that_is_to_be(tmp_path: Path) -> None:
    lines = examine(Subject(RunPaths.of(tmp_path / "run"), servers=("http://127.0.0.1:1",)))
    subjects = [line.subject for line in lines]
    for wanted in (
        "python",
        f"journal {tmp_path}/run",
        f"output {tmp_path}/run/out",
        "server http://127.0.0.1:1",
        "runs",
    ):
        assert wanted in subjects
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("soft", "uid", "level"),
    [
        (64 << 10, 1000, Level.WARN),
        (64 << 10, 0, Level.OK),
        (machine.LEAST_PINNED, 1000, Level.OK),
        (resource.RLIM_INFINITY, 1000, Level.OK),
    ],
)
def test_locked_memory(soft: int, uid: int, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: uid)
    line = machine.pinned_memory(soft)
    assert line.level is level
    assert ("ulimit -l unlimited" in line.remedy) is (level is Level.WARN)


@pytest.mark.parametrize(
    ("kind", "system", "level", "word"),
    [
        ("journal", "nfs4", Level.FAIL, "a network file system"),
        ("output", "nfs4", Level.WARN, "a cache may answer the read-back"),
        ("journal", "ext4", Level.OK, "on ext4"),
    ],
)
def test_a_folder_on_a_network_file_system(
    kind: str, system: str, level: Level, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "file_system_type", lambda _place: system)
    assert the(list(storage.examine(kind, tmp_path, 0)), word).level is level


def test_a_disk_that_is_slow_to_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(fd: int) -> None:
        time.sleep(storage.SLOW_FSYNC_S * 1.2)
        os.fdatasync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    assert the(list(storage.examine("journal", tmp_path, 0)), "each group of commits waits so long").level is Level.WARN


def test_a_disk_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refusing(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    line = the(list(storage.examine("output", tmp_path, 0)), "no O_DIRECT")
    assert (line.level, line.remedy) == (Level.WARN, "Nothing to do; it costs CPU and memory.")


@pytest.mark.root
def test_a_disk_that_runs_out_of_inodes(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "few", "8m,nr_inodes=100") as mount:
        line = the(list(storage.examine("output", mount, 0)), "files can still be made")
    assert line.level is Level.WARN


@pytest.mark.root
def test_a_root_of_somebody_elses(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    line = the(list(handover.examine(tmp_path, 1 << 30, 0)), "belongs to user 12345")
    assert (line.level, "HSJOURNAL_GROUP_MODE=1" in line.remedy) == (Level.WARN, True)


def test_a_containers_memory_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="hsj-doctor-", dir="/dev/shm") as folder:
        root = Path(folder)
        assert the(list(handover.examine(root, 1 << 30, 1 << 20)), "largest sample").level is Level.OK
        for module in (handover, room):
            monkeypatch.setattr(module, "memory_rooms", lambda _proc, _cgroups: [65 << 20])
        line = the(list(handover.examine(root, 1 << 30, 8 << 20)), "largest sample")
    assert line.level is Level.FAIL
    assert "memory left to this container or machine: 68.2 MB" in line.words
    assert "a container limit that counts tmpfs" in line.remedy


def test_a_user_that_lingers_and_settings_beside_the_main_file(tmp_path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    (tmp_path / "logind.conf").write_text("[Login]\nRemoveIPC=no\n")
    (tmp_path / "logind.conf.d").mkdir()
    (tmp_path / "logind.conf.d" / "10.conf").write_text("[Login]\nRemoveIPC=yes\n")
    line = machine.shared_memory_after_logout(nobody.pw_uid, tmp_path, tmp_path / "linger")
    assert (line.level, "enable-linger" in line.remedy) == (Level.WARN, True)
    (tmp_path / "linger").mkdir()
    (tmp_path / "linger" / "nobody").touch()
    assert "lingers" in machine.shared_memory_after_logout(nobody.pw_uid, tmp_path, tmp_path / "linger").words


def test_a_runs_own_servers_roots_and_budget(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.PENDING], tokens=[700])
    options = run.manifest.options | {
        "server": "http://127.0.0.1:1",
        MORE_SERVERS: json.dumps([["http://127.0.0.1:2", str(tmp_path / "second")]]),
    }
    run.paths.manifest.write_text(replace(run.manifest, options=options).to_toml())
    run.paths.settings.write_text("handover-budget = 1000\n")
    lines = examine(Subject(run.paths))
    levels_of = {line.subject: line.level for line in lines if "largest sample" in line.words}
    roots = {f"hand-over {run.root}", f"hand-over {tmp_path / 'second'}"}
    assert levels_of == dict.fromkeys(roots, Level.FAIL), "the budget of the last start holds no sample"
    servers = {line.subject for line in lines if line.subject.startswith("server ")}
    assert servers == {"server http://127.0.0.1:1", "server http://127.0.0.1:2"}
    asked = examine(Subject(run.paths, budget=1 << 30, servers=("http://127.0.0.1:2",)))
    assert {line.subject for line in asked if line.subject.startswith("hand-over")} == {
        f"hand-over {tmp_path / 'second'}"
    }
    assert all(line.level is not Level.FAIL for line in asked if line.subject.startswith("hand-over"))
