"""One engine for a module of tests, and runs that are attached to it."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.drill.stage import DrillEngine, Stage, random_prompts, wait_for, words
from tests.helpers.drill.truth import Findings, Truth


@dataclass(frozen=True, slots=True)
class Served:
    """A model and an engine that serves it to any number of runs, through one hand-over root."""

    model: Path
    engine: DrillEngine
    home: Stage


@contextmanager
def served(model: Path, pace: float = 0.0, root: Path | None = None, faults: str = "") -> Iterator[Served]:
    """Start an engine over ``model``, armed with ``faults``; ``root`` instead of a folder of its own in tmpfs."""
    with Stage.make(model, []) as home:
        if root is not None:
            home.given_root = root
        engine = DrillEngine(home, pace)
        engine.start(faults)
        engine.wait()
        yield Served(model, engine, home)


class Attached:
    """A run of a few rows that is attached to an engine.

    Args:
        served: the engine.
        rows: how many.
        base: where its folders are made.
        shortest: tokens of its shortest row.
    """

    def __init__(self, served: Served, rows: int, base: Path | None = None, shortest: int = 3) -> None:
        prompts = random_prompts(rows, random.Random(rows), shortest)
        self.stage = Stage.make(served.model, prompts, base, served.home)
        self.truth = Truth(self.stage)
        self._url = served.engine.url

    def run(self, *options: str, faults: str = "") -> subprocess.Popen[bytes]:
        """Start ``hsjournal run``, or go on with it."""
        stage = self.stage
        arguments = ["run", str(stage.run_dir), "--retry-pause", "0.3", "--plain"]
        if not (stage.run_dir / "manifest.toml").exists():
            arguments += ["--prompts", str(stage.prompts_file), "--model", str(stage.model), "--server", self._url]
            arguments += ["--out", str(stage.out_dir), "--handover-root", str(stage.root)]
        return stage.hsjournal(*arguments, *options, HSJOURNAL_FAULTS=faults)

    def wait_files(self, count: int, child: subprocess.Popen[bytes], timeout: float = 90.0) -> None:
        """Until so many files have their final name."""
        wait_for(lambda: child.poll() is not None or self.truth.finished() >= count, timeout, f"{count} files")
        assert child.poll() is None, words(child)

    def count_words(self, text: str, child: subprocess.Popen[bytes]) -> int:
        """How many lines it has said with ``text`` in them."""
        return sum(text in line for line in words(child, 1 << 20).splitlines())

    def wait_words(
        self, text: str, child: subprocess.Popen[bytes], timeout: float = 60.0, *, more_than: int = 0
    ) -> str:
        """Until it has said ``text`` in more lines than ``more_than``; the last of them."""
        wait_for(
            lambda: child.poll() is not None or self.count_words(text, child) > more_than, timeout, f"{text!r} is said"
        )
        lines = [line for line in words(child, 1 << 20).splitlines() if text in line]
        assert len(lines) > more_than, words(child)
        return lines[-1]

    def check(self) -> None:
        """All rows are verified and right, none was struck, and nothing is left behind."""
        findings = self.truth.judge(Findings())
        assert findings.lines() == []
        assert self.truth.struck() == []
        assert [p.name for p in self.stage.root.iterdir() if self.truth.run_id in p.name] == []
        assert [str(p) for p in self.stage.out_dir.rglob("*") if p.is_file() and p.suffix != ".ckpt"] == []


@contextmanager
def attached(served: Served, rows: int, base: Path | None = None) -> Iterator[Attached]:
    """A run on a stage of its own; its processes end and its folders go with the block."""
    run = Attached(served, rows, base)
    with run.stage:
        yield run
