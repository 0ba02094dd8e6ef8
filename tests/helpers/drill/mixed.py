"""The campaign: faults of all kinds, on real processes, with real freezes, and in this process; its composition is told."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.drill.attached import Served, served
from tests.helpers.drill.field import Field
from tests.helpers.drill.inprocess import one_run
from tests.helpers.drill.knobs import Knobs
from tests.helpers.drill.report import say
from tests.helpers.drill.truth import Findings
from tests.helpers.drill.verdicts import stories
from tests.helpers.mounts import ext4

FAULTS_A_RUN, RUNS_ROWS = 26, 300
IN_PROCESS_A_RUN = 8
STORIES = 0.25
"""Share of the in-process faults that are told to the judge alone."""
DISK_MB = 96

Fault = Callable[[Field], bool | None]
PLAIN: tuple[tuple[Fault, int], ...] = (
    (Field.kill_worker, 6), (Field.kill_supervisor, 3), (Field.restart_server, 1), (Field.stop_worker_shortly, 5),
    (Field.stop_worker, 2), (Field.stop_server_shortly, 5), (Field.stop_server, 1), (Field.break_storage, 8),
    (Field.slow_storage, 3), (Field.stuck_thread, 2), (Field.spoil_dump, 8), (Field.delete_dump, 6), (Field.late_dumps, 1),
)  # fmt: skip
ON_DISK: tuple[Fault, ...] = (
    Field.freeze_shortly, Field.freeze, Field.fill_disk, Field.freeze_shortly, Field.freeze, Field.freeze_shortly,
    Field.kill_worker, Field.freeze,
)  # fmt: skip
MOST_TRIES = 3
FREEZES = 6
"""In one round of :data:`ON_DISK`."""


@dataclass(slots=True)
class Mixed:
    """What was done and found."""

    real: Counter[str] = field(default_factory=Counter)
    in_process: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)
    false_stalls: list[str] = field(default_factory=list)
    missed_stalls: list[str] = field(default_factory=list)
    called: list[float] = field(default_factory=list)
    wrong_verdicts: list[str] = field(default_factory=list)
    rows: int = 0

    @property
    def freezes(self) -> int:
        """Real ones."""
        return sum(count for kind, count in self.real.items() if kind.startswith("freeze"))

    def lines(self) -> list[str]:
        """Everything that was found, in words."""
        told = [
            ("false stall", self.false_stalls),
            ("missed stall", self.missed_stalls),
            ("verdict", self.wrong_verdicts),
        ]
        return [*self.findings.lines(), *(f"{name}: {item}" for name, items in told for item in items)]

    def summary(self) -> dict[str, object]:
        """The drill's last line, but for the time."""
        return {
            "faults": sum(self.real.values()) + sum(self.in_process.values()),
            "real_processes": sum(self.real.values()),
            "real_freezes": self.freezes,
            "in_process": sum(self.in_process.values()),
            "rows": self.rows,
            **self.findings.counts(),
            "false_stalls": len(self.false_stalls),
            "missed_stalls": len(self.missed_stalls),
            "wrong_verdicts": len(self.wrong_verdicts),
            "stall_called_after_s": round(max(self.called), 2) if self.called else None,
            "kinds": dict(sorted(self.real.items())),
            "kinds_in_process": dict(sorted(self.in_process.items())),
        }


def campaign(model: Path, real: int, in_process: int, seed: int, base: Path | None = None) -> Mixed:
    """Run it.

    Args:
        model: a tiny model's folder.
        real: faults on real processes, freezes among them where this process is root.
        in_process: faults on the real worker, store, reader and sink in this process.
        seed: of every choice (what the machine makes of it differs from time to time).
        base: where the folders are made.
    """
    mixed = Mixed()
    _in_process(mixed, in_process, seed)
    if real:
        folder = Path(tempfile.mkdtemp(prefix="hsj-campaign-", dir=base))
        try:
            knobs = Knobs(folder / "pace", folder / "late")
            with served(model, faults=knobs.faults) as engine:
                _real(mixed, engine, real, random.Random(f"{seed}-real"), folder, knobs)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return mixed


def _in_process(mixed: Mixed, count: int, seed: int) -> None:
    kinds, judged = stories(random.Random(f"{seed}-judge"), int(STORIES * count))
    mixed.in_process += kinds
    mixed.false_stalls += [j.false_stall for j in judged if j.false_stall]
    mixed.missed_stalls += [j.missed_stall for j in judged if j.missed_stall]
    mixed.wrong_verdicts += [j.wrong_verdict for j in judged if j.wrong_verdict]
    number = 0
    while sum(mixed.in_process.values()) < count:
        found = Findings()
        kinds = one_run(random.Random(f"{seed}-{number}"), IN_PROCESS_A_RUN, found)
        mixed.in_process += kinds
        mixed.findings.add(found)
        for line in found.lines():
            say(f"in process, run {seed}-{number}: {line}")
        number += 1
    say(f"in process: {sum(mixed.in_process.values())} faults in {number} runs")


def _real(mixed: Mixed, engine: Served, count: int, draw: random.Random, folder: Path, knobs: Knobs) -> None:
    on_disk = 0
    if os.geteuid() == 0:
        rounds = max(1, count // 60)
        on_disk = rounds * len(ON_DISK)
        for number in range(rounds):
            with ext4(folder / f"disk-{number}", DISK_MB) as disk:
                scene = Field(engine, RUNS_ROWS // 3, draw, disk.mount, knobs, disk)
                _befall(mixed, scene, ON_DISK)
    makers, weights = zip(*PLAIN, strict=True)
    # Each kind once, then by weight.
    faults = [*makers, *draw.choices(makers, weights, k=max(0, count - on_disk - len(makers)))]
    draw.shuffle(faults)
    while faults:
        scene = Field(engine, RUNS_ROWS, draw, folder, knobs)
        faults = _befall(mixed, scene, faults[:FAULTS_A_RUN]) + faults[FAULTS_A_RUN:]


def _befall(mixed: Mixed, scene: Field, faults: Sequence[Fault]) -> list[Fault]:
    """One run and its faults; those that came too late for it."""
    left, tries = list(faults), Counter[str]()
    with scene.stage:
        while left and not scene.is_over:
            fault = left.pop(0)
            fired: bool | None = True
            try:
                fired = fault(scene)
            except AssertionError as error:  # it did not go on: told with all the rest
                mixed.findings.lost.append(f"{fault.__name__}: {error}")
                left.clear()
            if fired is False:  # there was nothing for it to befall: not counted, and tried again
                again = tries[fault.__name__] = tries[fault.__name__] + 1
                left += [fault] * (again < MOST_TRIES)
                continue
            mixed.real[fault.__name__] += 1
            done = sum(mixed.real.values())
            say(f"real fault {done}: {fault.__name__}; {scene.truth.finished()} of {len(scene.stage.prompts)} files")
        called = scene.end()
        mixed.rows += len(scene.stage.prompts)
        mixed.findings.add(scene.findings)
        mixed.false_stalls += [f"at {at}" for at in scene.stalls.false(called)]
        ended = scene.stalls.uncalled_for(scene.truth.times("worker_ending"))
        mixed.false_stalls += [f"a worker was ended at {at}, without cause" for at in ended]
        mixed.missed_stalls += scene.stalls.missed
        mixed.wrong_verdicts += scene.stalls.wrong
        mixed.called += scene.stalls.called
    return left
