"""Take over a half-finished extraction that has no journal: nothing that is already there is computed again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hsjournal.config import RunPaths
from hsjournal.errors import ExitCode, UsageError
from hsjournal.events import Event
from hsjournal.journal.fence import Fence
from hsjournal.journal.locks import Lock
from hsjournal.ops.compare import Compared, compare
from hsjournal.ops.custody import Custody, custody, need_output, refuse_living_worker
from hsjournal.ops.entering import Entering, Taken
from hsjournal.ops.finding import Findings, Task, find
from hsjournal.ops.matching import Fate, Rows
from hsjournal.ops.ready import ready
from hsjournal.ops.takein import TakeIn
from hsjournal.sink.folders import remove_temporaries
from hsjournal.sink.formats import layout_named
from hsjournal.sink.output import Output
from hsjournal.states import INCOMPLETE
from hsjournal.watch.supervisor import Job
from hsjournal.watch.view import View


@dataclass(frozen=True, slots=True)
class Adoption:
    """What to take over, and what speaks for its layers.

    Args:
        outputs: the folder; nothing in it is changed or deleted.
        layers: 0-based, as the user says that they are, aux ascending; None when nothing is said.
        compare: so many samples are run again and compared, where the files don't state their layers themselves.
        link: share the sources' bytes (reflink, else hard link) where a file can stay as it is.
    """

    outputs: Path
    layers: tuple[int, ...] | None = None
    compare: int = 3
    link: bool = False


@dataclass(slots=True)
class Report:
    """What was taken over, and what was not."""

    findings: Findings
    taken: Taken = field(default_factory=Taken)
    compared: list[Compared] = field(default_factory=list)
    layers_stated: tuple[int, ...] | None = None
    left: int = 0
    seconds: float = 0.0

    @property
    def exit_code(self) -> ExitCode:
        """3 when a file was refused, else 0."""
        return ExitCode.FAILED_SAMPLES if self.findings.refused else ExitCode.DONE

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        f, t = self.findings, self.taken
        return {
            "files": f.files,
            "adopted": sum(t.how.values()),
            "how": dict(t.how),
            "finished_before": t.finished_before,
            "tokens": t.tokens,
            "bytes": t.nbytes,
            "already": f.fates[Fate.ALREADY],
            "not_needed": f.fates[Fate.NOT_NEEDED],
            "unmatched": f.unmatched,
            "refused": [asdict(r) for r in f.refused],
            "ignored": f.ignored,
            "compared": [asdict(c) for c in self.compared],
            "layers_stated": self.layers_stated,
            "left": self.left,
            "seconds": round(self.seconds, 2),
        }


def adopt(
    paths: RunPaths,
    adoption: Adoption,
    job: Callable[[], Job],
    *,
    show: Callable[[View], None] = lambda _view: None,
    tell: Callable[[str, int, int], None] = lambda _step, _done, _total: None,
) -> Report:
    """Take over what lies in a folder; a run that does not exist yet is made first. May be broken off and begun again.

    Args:
        paths: of the run.
        adoption: what to take over.
        job: makes the run's job, when a server is needed: for a new run, or to compare.
        show: draws how far a server or a new run is.
        tell: called with a step's name, what is done of it, and what it is in all.

    Raises:
        UsageError: when the folder or the stated layers don't fit the run.
        JournalLockedError: when the run is going on.
        ServerError: when a server is needed and is not there.
        HsjournalError: when the states are not the server's, or the output's storage fails; what was entered stays.
    """
    began = time.monotonic()
    if not adoption.outputs.is_dir():
        raise UsageError(f"there is no folder {adoption.outputs}", remedy="Name the folder with the files (--outputs).")
    with ExitStack() as stack:
        serving = stack.enter_context(ExitStack())
        at: tuple[str, Path] | None = None
        lock = Lock(paths.supervisor_lock)
        stack.callback(lock.release)
        if paths.manifest.exists():
            lock.acquire()
        else:
            made = job()
            _in_place(adoption.outputs, made.out_dir)
            lock.acquire()
            refuse_living_worker(paths)
            at = (serving.enter_context(ready(made, show)), Path(made.settings.handover_root))
        held = stack.enter_context(custody(paths, lock))
        need_output(held.out_dir)
        in_place = _in_place(adoption.outputs, held.out_dir)
        _refuse_other_layers(adoption, held)
        layout = layout_named(held.manifest.format)
        rows = Rows(held.journal, layout.path_of)
        report = Report(
            find(
                adoption.outputs,
                held.manifest,
                rows,
                in_place=in_place,
                tell=lambda done, total: tell("looking", done, total),
            )
        )
        if _needs_proof(adoption, report.findings.tasks):
            if at is None:
                made = job()
                at = (serving.enter_context(ready(made, show)), Path(made.settings.handover_root))
            tell("comparing", 0, adoption.compare)
            report.compared = compare(*at, held.manifest, _spread(report.findings.tasks, adoption), adoption.compare)
            if not report.compared:
                raise UsageError(
                    "no file could be compared with the server", remedy="State their layers with --layers-checked."
                )
        serving.close()
        _enter(held, adoption, report, in_place=in_place, tell=lambda done, total: tell("adopting", done, total))
        counts = held.journal.counts()
        report.left = sum(counts[state].rows for state in INCOMPLETE)
        if not report.left:
            held.journal.finish()
    report.seconds = time.monotonic() - began
    return report


def _enter(
    held: Custody, adoption: Adoption, report: Report, *, in_place: bool, tell: Callable[[int, int], None]
) -> None:
    epoch = held.take_epoch("adopt")
    manifest, rejects, fence = held.manifest, held.paths.rejects, Fence(held.paths.journal, epoch)
    report.layers_stated = adoption.layers
    detail: dict[str, Any] = {"outputs": str(adoption.outputs), "files": report.findings.files}
    detail |= {"layers_stated": adoption.layers, "compared": [asdict(c) for c in report.compared]}
    held.journal.apply([], epoch, [Event("adopting", None, detail)])
    remove_temporaries(held.out_dir, manifest.run_id)
    with closing(Output(manifest, rejects, fence)) as output:
        take_in = TakeIn(manifest, output, rejects, fence, link=adoption.link, in_place=in_place)
        entering = Entering(held, epoch, output, take_in, report.taken, report.findings.refused, in_place=in_place)
        entering.run(report.findings.tasks, tell)


def _in_place(outputs: Path, out_dir: Path) -> bool:
    """Whether the files are to stay where they are.

    Raises:
        UsageError: when one folder lies within the other.
    """
    one, other = Path(os.path.realpath(outputs)), Path(os.path.realpath(out_dir))
    if one != other and (one.is_relative_to(other) or other.is_relative_to(one)):
        raise UsageError(
            f"the files in {outputs} and the output folder {out_dir} lie within one another",
            remedy="Name the output folder itself to adopt in place, or keep the two apart (--out).",
        )
    return one == other


def _refuse_other_layers(adoption: Adoption, held: Custody) -> None:
    layers = held.manifest.capture_layers
    if adoption.layers is not None and adoption.layers != layers:
        raise UsageError(
            f"the files are said to hold the outputs of layers {list(adoption.layers)}, the run captures {list(layers)}",
            remedy="Layers are 0-based and named by their output; some tools name the input of the next one instead.",
        )


def _needs_proof(adoption: Adoption, tasks: Sequence[Task]) -> bool:
    """Whether a server must speak for the layers: nobody else does for some file.

    Raises:
        UsageError: when it must and may not.
    """
    if adoption.layers is not None or all(task.proven for task in tasks):
        return False
    if adoption.compare == 0:
        raise UsageError(
            "the files don't say which layers they hold",
            remedy="State them with --layers-checked, or let some be compared with the server (--compare).",
        )
    return True


def _spread(tasks: Sequence[Task], adoption: Adoption) -> list[tuple[Path, int]]:
    """Files to compare: from all over the folder, then the others in case some are unusable."""
    unproven = [task for task in tasks if not task.proven]
    step = max(1, len(unproven) // adoption.compare)
    order = unproven[::step] + [task for number, task in enumerate(unproven) if number % step]
    return [(task.path, task.row) for task in order]
