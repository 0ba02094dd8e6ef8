"""How the hand-over grows with the samples in flight: a real worker, journal included, dumps to verified files.

Beside each: what bounds it. Threads seen running, waiting for the disk, or asleep (for the interpreter's lock, for each
other, for nothing to do); the wait for the lock as a thread feels it; CPU seconds per GB; how busy the disk was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import psutil
from bars import Bar, say, work_folder
from handover_scene import TOKENS, Scene, sample_bytes

from hsjournal.config import RunPaths, Settings

_LOOK_EVERY = 0.02


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of this benchmark."""
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N")
    parser.add_argument(
        "--lanes", type=int, nargs="+", metavar="N", help="processes that write [default: as a run has]"
    )
    parser.add_argument("--total", type=float, default=8.0, metavar="GB", help="per case [default: 8]")
    parser.add_argument("--profile", action="store_true", help="look at every thread meanwhile")
    parser.add_argument("--tokens-each", type=int, default=TOKENS, help=f"of a sample [default: {TOKENS}]")
    parser.add_argument("--dd-mib", type=int, default=4096, help="that dd writes [default: 4096]")
    parser.add_argument("--settings", default="{}", metavar="JSON", help="further settings of the worker")


def run(options: argparse.Namespace) -> list[Bar]:
    """Written and verified MB/s for each number in flight; no goals, since disks differ."""
    bars = []
    scene = Scene(options.tokens_each)
    try:
        with work_folder(options.folder, on_disk=True) as folder:
            disk = _dd(folder, options.dd_mib)
            bars.append(Bar("dd_mb_s", disk, None, "higher", "dd oflag=direct bs=8M conv=fsync, before the first case"))
            words = "dd writing and dd reading at once, MB/s of the slower: what write and read-back can have at most"
            bars.append(Bar("dd_both_mb_s", _dd_both(folder, options.dd_mib), None, "higher", words))
            for lanes in options.lanes or [None]:
                for number in options.concurrency:
                    case = _case(scene, folder / "run", number, lanes, options)
                    bars += _bars(case, f"{number}" if lanes is None else f"{number}_lanes_{lanes}", disk)
            bars.append(
                Bar("dd_after_mb_s", _dd(folder, options.dd_mib), None, "higher", "the same after the last case")
            )
    finally:
        scene.close()
    return bars


@dataclass(frozen=True, slots=True)
class _Case:
    mb_s: float
    told: dict[str, Any]
    gb: float
    span: float
    busy: float
    threads: dict[str, float]


def _case(scene: Scene, folder: Path, number: int, lanes: int | None, options: argparse.Namespace) -> _Case:
    rows = max(round(options.total * 1e9 / sample_bytes(options.tokens_each)), 2 * number)
    paths, epoch = scene.run(folder, rows)
    more = json.loads(options.settings)
    if lanes is not None:
        more["sink_processes"] = lanes
    known = {f.name for f in fields(Settings)}
    settings = replace(
        Settings(server_url="http://127.0.0.1:9", handover_root=str(scene.root)),
        **{
            key: value
            for key, value in ({"max_in_flight": number, "sink_threads": number} | more).items()
            if key in known
        },
    )
    try:
        return _measure(paths, epoch, settings, rows, options.profile)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for left in scene.root.iterdir():
            shutil.rmtree(left, ignore_errors=True)


def _measure(paths: RunPaths, epoch: int, settings: Settings, rows: int, profile: bool) -> _Case:
    script = Path(__file__).with_name("scaling_child.py")
    command = [sys.executable, str(script), str(paths.run_dir), "--epoch", str(epoch), "--settings", settings.to_json()]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    looks = _Looks(worker.pid, paths.run_dir)
    if profile:
        looks.start()
    out, err = worker.communicate()
    looks.stop()
    told = json.loads(out.splitlines()[-1]) if out.strip() else {}
    connection = sqlite3.connect(paths.journal)  # the run is over: nobody else has it open
    ((done, last, nbytes),) = connection.execute(
        "SELECT count(*), max(verified_at), sum(output_bytes) FROM sample WHERE state = 'verified'"
    ).fetchall()
    connection.close()
    if worker.returncode or done != rows:
        log = paths.logs / "worker.log"
        raise SystemExit(f"bench: {done} of {rows} rows verified\n{err[-4000:]}\n{log.read_text()[-4000:]}")
    span = last - told["began"]
    return _Case(nbytes / 1e6 / span, told, nbytes / 1e9, span, looks.busy(), looks.mean())


def _bars(case: _Case, name: str, disk: float) -> list[Bar]:
    told = case.told
    cpu = sum(told[key] for key in ("user_s", "system_s", "lanes_user_s", "lanes_system_s"))
    note = (
        f"{case.mb_s / disk:.2f} of dd; {case.gb:.1f} GB in {case.span:.1f} s; CPU {cpu / case.gb:.2f} s/GB; lock wait "
        f"{told['lock_wait_ms']:.2f} ms, worst {told['lock_worst_ms']:.0f}; RSS {told['rss_mb']:.0f}"
        f" + {told['lanes_rss_mb']:.0f} MB a lane"
    )
    if case.threads:
        seen = ", ".join(f"{k} {v:.1f}" for k, v in sorted(case.threads.items(), key=lambda item: -item[1]))
        note += f"; disk busy {case.busy:.0%}; threads: {seen}"
    say(f"{name} in flight: {case.mb_s:.0f} MB/s, {note}")
    return [Bar(f"verified_mb_s_{name}", case.mb_s, None, "higher", note)]


class _Looks(threading.Thread):
    """Looks at every thread of a process and its children, and at the disk, again and again."""

    def __init__(self, pid: int, folder: Path) -> None:
        super().__init__(daemon=True)
        self._pid, self._ended = pid, threading.Event()
        self._seen: Counter[str] = Counter()
        self._count = 0
        self._device = os.stat(folder).st_dev
        self._io: list[tuple[float, int]] = []

    def run(self) -> None:
        """Look until told to stop."""
        while not self._ended.wait(_LOOK_EVERY):
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(self._pid)
                for pid in (self._pid, *(child.pid for child in process.children(recursive=True))):
                    self._look(pid)
                self._count += 1
                self._io.append((time.monotonic(), self._io_ticks()))

    def stop(self) -> None:
        """Stop, if started."""
        self._ended.set()
        if self.is_alive():
            self.join()

    def mean(self) -> dict[str, float]:
        """Mean number of threads by what they did."""
        return {name: count / self._count for name, count in self._seen.items() if count / self._count >= 0.05}

    def busy(self) -> float:
        """Share of the time that the disk had something to do."""
        if len(self._io) < 2:
            return 0.0
        return (self._io[-1][1] - self._io[0][1]) / 1000 / (self._io[-1][0] - self._io[0][0])

    def _look(self, pid: int) -> None:
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                place = Path(f"/proc/{pid}/task/{tid}")
                state = place.joinpath("stat").read_text().rpartition(")")[2].split()[0]
                where = place.joinpath("wchan").read_text().strip("0\n")
                lane = "" if pid == self._pid else "lane "
                name = {"R": "running", "D": "disk"}.get(state) or f"asleep in {where or 'user space'}"
                self._seen[lane + name] += 1

    def _io_ticks(self) -> int:
        major, minor = os.major(self._device), os.minor(self._device)
        for line in Path("/proc/diskstats").read_text().splitlines():
            numbers = line.split()
            if numbers[:2] == [str(major), str(minor)]:
                return int(numbers[12])
        return 0


def _dd(folder: Path, mib: int) -> float:
    """MB/s that dd writes past the page cache."""
    file = folder / "dd.bin"
    begin = time.monotonic()
    _end(_dd_write(file, mib))
    seconds = time.monotonic() - begin
    file.unlink()
    return (mib << 20) / 1e6 / seconds


def _dd_both(folder: Path, mib: int) -> float:
    """MB/s that dd writes while another reads as much, both past the page cache: the slower of the two."""
    old, new = folder / "dd.old", folder / "dd.new"
    _end(_dd_write(old, mib))
    begin = time.monotonic()
    writing = _dd_write(new, mib)
    reading = subprocess.Popen(["dd", f"if={old}", "of=/dev/null", "bs=8M", "iflag=direct"], stderr=subprocess.DEVNULL)
    _end(writing, reading)
    seconds = time.monotonic() - begin
    old.unlink()
    new.unlink()
    return (mib << 20) / 1e6 / seconds


def _dd_write(file: Path, mib: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["dd", "if=/dev/zero", f"of={file}", "bs=8M", f"count={mib // 8}", "oflag=direct", "conv=fsync"],
        stderr=subprocess.DEVNULL,
    )


def _end(*processes: subprocess.Popen[bytes]) -> None:
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("bench: dd failed: is the disk full?")
