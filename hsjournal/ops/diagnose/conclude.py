"""From everything that was seen to one verdict, one sentence and the next step: pure, in the watcher's own words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hsjournal.errors import ExitCode
from hsjournal.watch.deeds import meaning
from hsjournal.watch.places import Places
from hsjournal.watch.presence import Ending
from hsjournal.watch.verdict import AT_SERVER, Finding, Judge, Limits, Look, Verdict

COMPLETE, PREPARING = "complete", "preparing"
"""Beside the watcher's verdicts: what a run may be when no worker is at it."""
SUSPICIOUS_S = 5.0
"""Seconds of silence from which a thread that is stuck in the kernel is worth a word, long before it is a stall."""
_EXIT = {
    Verdict.SERVER_DOWN: ExitCode.SERVER,
    Verdict.SERVER_STALLED: ExitCode.SERVER,
    Verdict.DISK_FULL: ExitCode.NO_ROOM,
    Verdict.SHM_FULL: ExitCode.NO_ROOM,
    Verdict.FAILURES: ExitCode.SERVER,
}
_ENDS = (ExitCode.NO_ROOM, ExitCode.NO_JOURNAL, ExitCode.SERVER)
"""Of a run that has ended: what lasts, most likely; any other end is just something to be done."""
_STEPS = {
    Verdict.STORAGE_STALLED: "Look at {storage} (dmesg, mount, the file server). The run goes on by itself when it answers.",
    Verdict.UNKILLABLE: "Mend {storage}; only its return, or a reboot, ends the process. Start no second run on it.",
    Verdict.SERVER_STALLED: "Look at the server's log and its GPUs, and restart the server; the run goes on by itself.",
    Verdict.WORKER_STOPPED: "kill -CONT {pid}",
    Verdict.WORKER_STUCK: "kill {pid}: the supervisor starts another one, and nothing is lost.",
    Verdict.DISK_FULL: "Make room on {storage}; the run goes on by itself.",
    Verdict.SHM_FULL: "Make room in {root}; the run goes on by itself.",
    Verdict.SUPERVISOR_DEAD: "Go on with: hsjournal resume {run_dir}",
}
"""Where more can be said than the watcher's own way out."""
_KEPT = (
    Verdict.STORAGE_STALLED, Verdict.UNKILLABLE, Verdict.SERVER_STALLED, Verdict.SERVER_DOWN, Verdict.SHM_FULL,
)  # fmt: skip
"""Where it is worth a word that what lies in the hand-over root is not lost."""
_CALM = (Verdict.HEALTHY, Verdict.SLOW, Verdict.WAITING)
_BY_SILENCE = (Verdict.STORAGE_STALLED, Verdict.SERVER_STALLED, Verdict.SERVER_DOWN, Verdict.WORKER_STUCK)
"""What a silence alone may look like to who has watched for a second."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What it is and what to do.

    Args:
        verdict: one of the watcher's, or ``complete``, ``preparing``.
        sentence: for people.
        next_step: what to do now.
        exit_code: 0 when nothing needs to be done.
        silent_s: seconds since the last progress, None when unknown.
        row: the row concerned.
        threads: the threads that show it.
    """

    verdict: str
    sentence: str
    next_step: str
    exit_code: ExitCode
    silent_s: float | None = None
    row: int | None = None
    threads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen of a run.

    Args:
        run_dir: for the words.
        looks: at the worker, oldest first; empty when none was ever seen.
        progress_at: monotonic seconds of the last progress.
        limits: of this run.
        supervisor: ``alive``, ``stuck`` (stopped, in the kernel, or without a sign of life), ``ended`` (by itself),
            ``dead`` or ``none``.
        silence: of a stuck supervisor, in words.
        ending: of one that ended by itself, as far as it could tell.
        stage: of a living supervisor: ``preparing``, ``waiting``, ….
        said: its sentence.
        complete: whether every row has ended.
        failed: rows that are failed.
        open_rows: rows that have not ended, None when unknown.
        hangs: places that did not answer in time.
        refused: why no request could reach the server, when that is sure.
        places: the storage that a phase works on, for the next step.
        hung: the storage of what did not answer.
        dumps: complete dumps in the hand-over root that rows wait for.
        told: what the supervisor, which has watched for longer, said last; None when that is old.
    """

    run_dir: str
    looks: Sequence[Look] = ()
    progress_at: float | None = None
    limits: Limits = field(default_factory=Limits)
    supervisor: str = "none"
    stage: str = ""
    said: str = ""
    complete: bool = False
    failed: int = 0
    open_rows: int | None = None
    hangs: tuple[str, ...] = ()
    refused: str | None = None
    places: Places = field(default_factory=Places)
    hung: str = ""
    silence: str = ""
    ending: Ending | None = None
    dumps: int = 0
    told: Finding | None = None


def conclude(facts: Facts) -> Conclusion:
    """One verdict. A worker that lives decides; else its supervisor; else what they left."""
    if facts.looks and facts.looks[-1].process is not None:
        return _of_worker(facts)
    if facts.supervisor in ("alive", "stuck"):
        return _of_supervisor(facts)
    if facts.complete:
        if facts.failed:
            words = f"every row has ended, {facts.failed:,} of them failed"
            step = f"See `hsjournal status {facts.run_dir}`; `hsjournal retry` tries them again."
            return Conclusion(COMPLETE, words, step, ExitCode.FAILED_SAMPLES)
        return Conclusion(COMPLETE, "every row has ended well", "Nothing to do.", ExitCode.DONE)
    left = "rows are left" if facts.open_rows is None else f"{facts.open_rows:,} rows are left"
    who = "its supervisor died" if facts.supervisor == "dead" else "no supervisor is there"
    words = f"nobody works on this run: {who}, and {left}"
    if facts.ending is not None:
        words = f"nobody works on this run, and {left}: it {facts.ending.words}"
    if facts.hangs:
        words += f"; {', '.join(facts.hangs)} can't be read: its storage hangs"
        step = f"Mend the storage first, then: hsjournal resume {facts.run_dir}"
        return Conclusion(Verdict.STORAGE_STALLED, words, step, ExitCode.ERROR)
    if facts.ending is not None:
        code = ExitCode(facts.ending.exit_code) if facts.ending.exit_code in _ENDS else ExitCode.ERROR
        return Conclusion(facts.ending.verdict, words, facts.ending.remedy, code)
    verdict = Verdict.SUPERVISOR_DEAD if facts.supervisor == "dead" else Verdict.NOT_RUNNING
    return Conclusion(verdict, words, f"Go on with: hsjournal resume {facts.run_dir}", ExitCode.ERROR)


def judged(facts: Facts) -> tuple[Finding, float]:
    """What the watcher would say of these looks, with the silence that went before them; and its patience now."""
    first = facts.looks[0]
    began = first.at if facts.progress_at is None else min(facts.progress_at, first.at)
    judge = Judge(replace(facts.limits, longest_gap=math.inf), began)
    finding = judge.judge(replace(first, at=began))  # sets the marks: only what moves from here on is progress
    for look in facts.looks:
        finding = judge.judge(look)
    return finding, judge.patience(facts.looks[-1])


def _of_worker(facts: Facts) -> Conclusion:
    finding, patience = judged(facts)
    last = facts.looks[-1]
    process = last.process
    assert process is not None
    stuck = _always_stuck(facts.looks)
    if finding.verdict in (*_CALM, Verdict.WORKER_STUCK) and facts.refused is not None:
        words = f"the server does not answer ({facts.refused}); last progress {finding.silent_s:.0f} s ago"
        finding = Finding(Verdict.SERVER_DOWN, words, finding.silent_s)
    if finding.verdict in _CALM and process.is_stopped:
        words = f"the worker is stopped by a signal or a debugger; last progress {finding.silent_s:.0f} s ago"
        finding = Finding(Verdict.WORKER_STOPPED, words, finding.silent_s)
    if facts.told is not None and (
        finding.verdict in _CALM
        # A second's look sees a silence; its patience, and which part of it was a pause, only the supervisor knows.
        or (finding.verdict in _BY_SILENCE and not (stuck or process.is_stopped or facts.refused))
    ):
        finding = facts.told
    if finding.verdict in _CALM and facts.supervisor == "stuck":
        finding = replace(finding, verdict=Verdict.SUPERVISOR_STUCK, sentence=f"{facts.silence}; the worker lives")
    words = finding.sentence
    if finding.verdict in _CALM and stuck and finding.silent_s >= SUSPICIOUS_S:
        words += f"; {len(stuck)} thread(s) hang in the kernel ({stuck[0]}), which counts as a stall after {patience:.0f} s of silence"
    if facts.supervisor in ("dead", "ended"):
        words += "; its supervisor is dead" if facts.ending is None else f"; its supervisor {facts.ending.words}"
    code = ExitCode.DONE if finding.verdict in _CALM else _EXIT.get(finding.verdict, ExitCode.ERROR)
    step = _next_step(finding, facts, process.pid)
    threads = finding.threads or tuple(stuck)
    return Conclusion(finding.verdict, words, step, code, finding.silent_s, finding.row, threads)


def _of_supervisor(facts: Facts) -> Conclusion:
    said = f"the supervisor says: {facts.said or facts.stage}"
    if facts.supervisor == "stuck":
        words = f"no worker is there, and {facts.silence or 'the supervisor itself does not run'}; last, {said}"
        step = _sentence(meaning(Verdict.SUPERVISOR_STUCK).way_out)
        return Conclusion(Verdict.SUPERVISOR_STUCK, words, step, ExitCode.ERROR)
    if facts.told is not None and facts.told.verdict not in _CALM and not facts.hangs:
        told, step = facts.told, _next_step(facts.told, facts, None)
        code = _EXIT.get(told.verdict, ExitCode.ERROR)
        return Conclusion(told.verdict, told.sentence, step, code, told.silent_s, told.row, told.threads)
    if facts.hangs:
        what = ", ".join(facts.hangs)
        found = Finding(Verdict.STORAGE_STALLED, f"no worker can be started, {what} hangs; {said}", 0.0)
        return Conclusion(found.verdict, found.sentence, _next_step(found, facts, None), ExitCode.ERROR)
    verdict = PREPARING if facts.stage == "preparing" else Verdict.WAITING
    return Conclusion(
        verdict, f"no worker is there yet; {said}", "Nothing to do yet; look again in a minute.", ExitCode.DONE
    )


def _next_step(finding: Finding, facts: Facts, pid: int | None) -> str:
    verdict, root = finding.verdict, facts.places.root or "the hand-over root"
    known = _STEPS.get(verdict, "")
    if pid is None and "{pid}" in known:
        known = ""
    words = (known or _sentence(meaning(verdict).way_out)).format(
        storage=_storage(finding, facts) or "the storage", root=root, pid=pid, run_dir=facts.run_dir
    )
    if facts.dumps and verdict in _KEPT:
        words += f" {facts.dumps:,} complete dump(s) wait in {root}: they are taken from there, not sent again."
    return words


def _storage(finding: Finding, facts: Facts) -> str:
    """Which one it is about: what did not answer us, what is paused for, or where the row and its threads stand still."""
    if facts.hung and pid_of(facts) is None:
        return facts.hung
    last = facts.looks[-1] if facts.looks else None
    if last is not None and finding.verdict in (Verdict.DISK_FULL, Verdict.DISK_FAILING):
        return facts.places.run_dir if "journal" in last.pauses else facts.places.out_dir
    rows = sorted(last.rows, key=lambda row: row.since) if last is not None else []
    phases = [
        row.phase for row in rows if row.row == finding.row or (finding.row is None and row.phase not in AT_SERVER)
    ]
    return facts.places.of(phases[0] if phases else None, finding.threads)


def pid_of(facts: Facts) -> int | None:
    """The worker that was looked at, if it lives."""
    process = facts.looks[-1].process if facts.looks else None
    return process.pid if process is not None else None


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}.".replace("{", "{{").replace("}", "}}")


def _always_stuck(looks: Sequence[Look]) -> list[str]:
    """Threads in uninterruptible sleep at every look."""
    seen = [look.process for look in looks if look.process is not None]
    if len(seen) < 2:
        return []
    everywhere = set.intersection(*({t.tid for t in p.stuck} for p in seen))
    return [f"{t.name}: {t.state} {t.wchan}".strip() for t in seen[-1].stuck if t.tid in everywhere]
