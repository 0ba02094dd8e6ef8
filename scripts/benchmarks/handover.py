"""Bars 1 to 4: dumps in /dev/shm to durable and to verified files, beside dd and beside the incident's client.

Every way takes its turn in every round, so that a noisy minute falls on all of them. Samples of 348 MB: 6,065 tokens of
7,168 columns, three aux layers and the final state, bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from bars import ROUNDS, Bar, medians, say, work_folder
from handover_scene import DTYPE, HIDDEN, LAYERS, TOKENS, Scene, sample_bytes
from journal import RUN

from hsjournal.dump.protocol import tensor_entries

SMALL_TOKENS = 174
"""10 MB."""
_PAIR = 4
"""Samples where two are in flight."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of this benchmark."""
    parser.add_argument("--sustained", type=float, default=4.2, metavar="GB", help="of one long round [default: 4.2]")
    parser.add_argument(
        "--dirty", type=float, default=10.0, metavar="GB", help="written for dirty_rise_mb [default: 10]"
    )
    parser.add_argument(
        "--longest-tokens", type=int, default=32_768, help="of the longest sample [default: 32768; 0 for none]"
    )
    parser.add_argument("--sample-tokens", type=int, default=TOKENS, help=f"of a sample [default: {TOKENS}]")


def run(options: argparse.Namespace) -> list[Bar]:
    """All figures of bars 1 to 4."""
    scene = Scene(options.sample_tokens)
    try:
        with work_folder(options.folder, on_disk=True) as folder, _Ways(scene, folder) as ways:
            return [*_speed(ways, options), *_held(ways), *_memory(folder, options), ways.dirty(options.dirty)]
    finally:
        scene.close()


def _speed(ways: _Ways, options: argparse.Namespace) -> list[Bar]:
    long = max(2, round(options.sustained * 1e9 / ways.nbytes))
    found = medians(
        {
            "dd": lambda: ways.dd(1),
            "incident": lambda: ways.go("incident", "incident", 1),
            "written": lambda: ways.go("written", "ours", 1),
            "bare": lambda: ways.go("bare", "bare", 1),
            "dd_2": lambda: ways.dd(_PAIR),
            "written_2": lambda: ways.go("written_2", "ours", _PAIR, at_once=2),
            "verified_2": lambda: ways.go("verified_2", "ours", _PAIR, at_once=2, verify=True),
            "incident_long": lambda: ways.go("incident_long", "incident", long),
            "written_long": lambda: ways.go("written_long", "ours", long, at_once=2),
        },
        options.rounds,
        say,
    )
    ways.tell_ratios()
    ratio, cpu = ways.ratio, ways.cpu
    mb = "; ".join(f"{name} {speed:.0f}" for name, speed in found.items())
    return [
        Bar("written_vs_dd", ratio("written", "dd"), 0.85, "higher", f"one sample; MB/s: {mb}"),
        Bar("written_vs_dd_2", ratio("written_2", "dd_2"), 0.95, "higher", "two in flight"),
        Bar("written_vs_incident", ratio("written", "incident"), 3, "higher", "one sample"),
        Bar("sustained_vs_incident", ratio("written_long", "incident_long"), 4, "higher", f"{long} samples in a row"),
        Bar("verified_vs_dd", ratio("verified_2", "dd_2"), 0.5, "higher", "read back past the cache, two in flight"),
        Bar("verified_vs_incident", ratio("verified_2", "incident"), 1.2, "higher", "beside it unverified"),
        Bar("cpu_s_per_gb_written", cpu("written"), 0.6, "lower", f"two in flight {cpu('written_2'):.2f}"),
        Bar("cpu_s_per_gb_verified", cpu("verified_2"), 0.8, "lower", "written and read back"),
        Bar("incident_cpu_s_per_gb", cpu("incident"), None, "lower", "the incident's client"),
        Bar("bare_cpu_s_per_gb", cpu("bare"), None, "lower", "preadv from /dev/shm and pwrite past the cache, no more"),
    ]


def _held(ways: _Ways) -> list[Bar]:
    """How long the interpreter's lock is held per GB: what one process could do with cores and disks without end."""
    bars = []
    with _Child(["ours", str(ways.scene.root), str(ways.out), str(ways.scene.tokens)], HSJ_BENCH_HELD="1") as child:
        for name, verify in (("written", False), ("verified", True)):
            taken = [child.ask(ways.order(1, verify=verify)) for _ in range(ROUNDS)]
            held = statistics.median(told["own_s"] - told["inside_s"] - told["cost_s"] for told in taken)
            held /= ways.nbytes / 1e9
            note = f"processor time outside the calls that give the lock up; so at best {1 / held:.1f} GB/s"
            bars.append(Bar(f"lock_held_s_per_gb_{name}", held, 0.4, "lower", note))
    return bars


def _memory(folder: Path, options: argparse.Namespace) -> list[Bar]:
    """What a process grows by, for small and for large samples, two in flight; each is read back, and so held equal."""
    grown = {}
    longest = options.longest_tokens
    for tokens in (SMALL_TOKENS, options.sample_tokens, *([longest] if longest else [])):
        scene = Scene(tokens)
        try:
            with _Ways(scene, folder, incident=False) as ways:
                samples = 2 if tokens == longest else 6
                last = ways.children["ours"].ask(ways.order(samples, at_once=2, verify=True))
                grown[tokens] = last["peak_mb"] - ways.children["ours"].rss_mb
        finally:
            scene.close()
    small, large = grown[SMALL_TOKENS], grown[options.sample_tokens]
    return [
        Bar("rss_growth_mb", large, 64, "lower", f"348 MB samples, two in flight; of 10 MB samples {small:.1f}"),
        Bar("rss_growth_more_mb", large - small, 8, "lower", "of 348 MB samples beside those of 10 MB"),
        *(
            [
                Bar(
                    "rss_growth_longest_mb",
                    grown[longest],
                    64,
                    "lower",
                    f"{longest:,} tokens, {sample_bytes(longest) / 1e9:.2f} GB",
                )
            ]
            if longest
            else []
        ),
    ]


class _Ways:
    """The ways from a dump to a file, each a process that lives through all rounds."""

    def __init__(self, scene: Scene, folder: Path, *, incident: bool = True) -> None:
        self.scene, self.nbytes = scene, sample_bytes(scene.tokens)
        self.out = folder / "out"
        self.out.mkdir(exist_ok=True)
        self._rows = 0
        self._stack = contextlib.ExitStack()
        self._taken: dict[str, list[dict[str, float]]] = {}
        self._pt = scene.tensors / "pt"
        self.children = {"ours": _Child(["ours", str(scene.root), str(self.out), str(scene.tokens)])}
        if incident:
            _save_tensors(scene, self._pt)
            self.children["incident"] = _Child(["incident", str(self._pt), str(self.out)])
            self.children["bare"] = _Child(["bare", str(scene.tensors), str(self.out)])

    def __enter__(self) -> Self:
        for child in self.children.values():
            self._stack.enter_context(child)
            child.ask(self.order(1))  # what the first one pays is nobody's figure
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def order(self, samples: int, *, at_once: int = 1, verify: bool = False) -> dict[str, Any]:
        """Work for a child: fresh dumps of so many samples."""
        rows = list(range(self._rows, self._rows + samples))
        self._rows += samples
        for row in rows:
            self.scene.publish(row)
        rid = f"hsj-{RUN}-ROW-1-{self.scene.tokens}"
        return {"rows": rows, "rid": rid, "at_once": at_once, "verify": verify}

    def go(self, name: str, way: str, samples: int, *, at_once: int = 1, verify: bool = False) -> float:
        """MB/s of states, kept under ``name``."""
        told = self.children[way].ask(self.order(samples, at_once=at_once, verify=verify))
        return self._took(name, samples, told)

    def dd(self, samples: int) -> float:
        """MB/s of ``dd oflag=direct`` for as many bytes."""
        file, blocks = self.out / "dd.bin", round(samples * self.nbytes / (8 << 20))
        begin = time.monotonic()
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={file}", "bs=8M", f"count={max(1, blocks)}", "oflag=direct", "conv=fsync"],
            check=True, capture_output=True,
        )  # fmt: skip
        seconds = (time.monotonic() - begin) * samples * self.nbytes / (max(1, blocks) * (8 << 20))
        file.unlink()
        return self._took("dd" if samples == 1 else "dd_2", samples, {"seconds": seconds, "cpu_s": 0.0})

    def ratio(self, one: str, other: str) -> float:
        """The median of the rounds' ratios of speed."""
        pairs = zip(self._taken[one], self._taken[other], strict=True)
        return statistics.median(a["mb_s"] / b["mb_s"] for a, b in pairs)

    def cpu(self, name: str) -> float:
        """CPU seconds per GB, the median."""
        return statistics.median(t["cpu_s_per_gb"] for t in self._taken[name])

    def tell_ratios(self) -> None:
        """CPU seconds of every way, for who watches."""
        say("CPU s/GB: " + ", ".join(f"{name} {self.cpu(name):.2f}" for name in self._taken if "dd" not in name))

    def dirty(self, gigabytes: float) -> Bar:
        """How far the dirty pages of the machine rise while so much is written."""
        samples = max(2, round(gigabytes * 1e9 / self.nbytes))
        watch = _Dirty()
        watch.start()
        told = self.children["ours"].ask(self.order(samples, at_once=2))
        rise = watch.stop()
        note = f"over {samples * self.nbytes / 1e9:.1f} GB in {told['seconds']:.1f} s; of the whole machine"
        return Bar("dirty_rise_mb", rise, 256, "lower", note)

    def _took(self, name: str, samples: int, told: dict[str, Any]) -> float:
        gb = samples * self.nbytes / 1e9
        speed: float = 1000 * gb / told["seconds"]
        self._taken.setdefault(name, []).append({"mb_s": speed, "cpu_s_per_gb": told["cpu_s"] / gb})
        return speed


class _Child:
    """A client in a process of its own."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        self._arguments, self._environment = arguments, environment

    def __enter__(self) -> Self:
        script = Path(__file__).with_name("handover_child.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), *self._arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | self._environment,
        )  # fmt: skip
        self.rss_mb = float(self._answer()["rss_mb"])
        """Before its first sample."""
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Have it work."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"bench: {self._arguments[0]} ended with {self._process.wait()}")
        told: dict[str, Any] = json.loads(line)
        return told


class _Dirty(threading.Thread):
    """Watches the machine's dirty pages."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._first = self._most = _dirty_mb()

    def run(self) -> None:
        """Look until told to stop."""
        while not self._ended.wait(0.02):
            self._most = max(self._most, _dirty_mb())

    def stop(self) -> float:
        """MB that they rose by."""
        self._ended.set()
        self.join()
        return self._most - self._first


def _dirty_mb() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum([int(line.split()[1]) for line in lines if line.startswith(("Dirty:", "Writeback:"))]) / 1024


def _save_tensors(scene: Scene, folder: Path) -> None:
    """The same tensors as ``.pt`` files, as the incident's server wrote them."""
    folder.mkdir()
    code = (
        "import sys, torch\n"
        "for source, target, rows in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):\n"
        f"    bits = torch.from_file(source, shared=False, size=int(rows) * {HIDDEN}, dtype=torch.{DTYPE})\n"
        f"    torch.save(bits.view(int(rows), {HIDDEN}), target)\n"
    )
    tensors = tensor_entries(scene.tokens, HIDDEN, DTYPE, len(LAYERS))
    arguments = [a for t in tensors for a in (scene.tensors / t.file, folder / f"{t.name}.pt", str(scene.tokens))]
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True)
