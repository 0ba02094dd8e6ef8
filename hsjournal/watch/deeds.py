"""What each verdict means, what the supervisor does about it, and the way out: a table, also shown in the README."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hsjournal.watch.verdict import Verdict


class Deed(Enum):
    """What the supervisor does once a verdict is overdue."""

    NOTHING = "nothing"
    WAIT = "waits"  # the worker has its own limit for it
    END_WORKER = "ends the worker, and starts another one"
    RESTART_SERVER = "restarts a server of its own; one that it is attached to, never"
    STAND_BY = "starts no other worker until it is gone"
    LOOK_ON = "tells, and goes on when it moves"


@dataclass(frozen=True, slots=True)
class Meaning:
    """One verdict.

    Args:
        means: what is the matter.
        deed: what is done when it lasts.
        does: the same for people.
        way_out: what the user can do, and how it ends.
    """

    means: str
    deed: Deed
    does: str
    way_out: str


_V, _D = Verdict, Deed

MEANINGS: dict[Verdict, Meaning] = {
    _V.HEALTHY: Meaning("rows pass their marks", _D.NOTHING, "nothing", "nothing to do"),
    _V.SLOW: Meaning("they do, but the last time was long ago", _D.NOTHING, "nothing", "nothing to do"),
    _V.WAITING: Meaning(
        "the worker waits, and says what for", _D.WAIT, "waits", "it goes on by itself, or ends at `--pause-limit`"
    ),
    _V.STORAGE_STALLED: Meaning(
        "a write, an fsync or a commit does not come back",
        _D.END_WORKER,
        "ends the worker (TERM, then KILL); the next one starts when a test file can be written",
        "mend the disk or the mount; the run goes on by itself",
    ),
    _V.UNKILLABLE: Meaning(
        "the worker waits in the kernel, SIGKILL has no effect",
        _D.STAND_BY,
        "waits (`--stuck-limit`, else for ever); no second worker on that storage",
        "mend the disk or the mount: then the worker ends and the run goes on, both by themselves",
    ),
    _V.SERVER_STALLED: Meaning(
        "the server answers `/health`, takes requests and sends no usable dump",
        _D.RESTART_SERVER,
        "restarts a server of its own, never one that it is attached to; the worker stays",
        "restart the server; the run goes on by itself, or ends with 13 at `--pause-limit`",
    ),
    _V.SERVER_DOWN: Meaning(
        "the server takes no connections",
        _D.RESTART_SERVER,
        "as above",
        "start the server; the run goes on by itself, or ends with 13 at `--pause-limit`",
    ),
    _V.WORKER_STOPPED: Meaning(
        "SIGSTOP or a debugger holds the worker",
        _D.END_WORKER,
        "kills it and starts another one; counts towards `--max-restarts`",
        "nothing to do; leave workers alone, or stop the run first",
    ),
    _V.WORKER_STUCK: Meaning(
        "the worker lives, perhaps even talks, and does nothing",
        _D.END_WORKER,
        "ends it and starts another one; counts towards `--max-restarts`",
        "nothing to do; please report it with `logs/worker.log`",
    ),
    _V.PREPARATION_STUCK: Meaning(
        "a new run does not get ready: its child lives and does nothing",
        _D.LOOK_ON,
        "tells, and goes on when it moves",
        "look at the disks of RUN_DIR, prompts and model; or stop it (Ctrl-C) and run it again, nothing is lost",
    ),
    _V.WORKER_DEAD: Meaning(
        "the worker ended",
        _D.NOTHING,
        "starts another one, with growing pauses; exit 4 after `--max-restarts` without a sample done",
        "see `logs/worker.log` and `hsjournal events RUN_DIR --kind worker_died` if it happens again",
    ),
    _V.DISK_FULL: Meaning(
        "output or journal: no room, or over quota",
        _D.WAIT,
        "waits",
        "make room; the run goes on by itself, or ends with 5 at `--pause-limit`",
    ),
    _V.DISK_FAILING: Meaning(
        "output or journal: I/O errors, read-only, unmounted",
        _D.WAIT,
        "waits",
        "mend or mount the disk; the run goes on by itself, or ends with 5 at `--pause-limit`",
    ),
    _V.SHM_FULL: Meaning(
        "the hand-over root has no room",
        _D.WAIT,
        "sends nothing and waits",
        "make room in it, or name another one with `--handover-root`",
    ),
    _V.ROOT_GONE: Meaning(
        "the hand-over root was deleted, or answers with errors",
        _D.WAIT,
        "makes it again; what was in it is sent again",
        "nothing to do if it can be made; else mend it",
    ),
    _V.JOURNAL_GONE: Meaning(
        "`journal.db` was deleted or replaced under the run",
        _D.NOTHING,
        "stops at once with 10; the worker leaves a whole copy in `journal.db.rescued`",
        "move the copy to `journal.db` (away with `journal.db-wal` and `-shm`), then resume",
    ),
    _V.FAILURES: Meaning(
        "many samples in a row failed, though the server does a probe",
        _D.WAIT,
        "tries one sample at a time, with growing pauses",
        "see the reasons in `status` and the server's log; ends with 13 at `--pause-limit`",
    ),
    _V.POISON: Meaning(
        "the worker died of one sample that was alone in flight; said until the next worker is at it",
        _D.NOTHING,
        "runs suspects alone; the sample is `failed` after `--max-strikes`, the others go on",
        "see its reason in `status`; `retry` tries it again",
    ),
    _V.SUPERVISOR_DEAD: Meaning(
        "the supervisor was killed; its worker ended with it",
        _D.NOTHING,
        "(nobody is there)",
        "`hsjournal resume` goes on; it waits for a worker that is still stuck",
    ),
    _V.SUPERVISOR_STUCK: Meaning(
        "the supervisor lives and gives no sign of life",
        _D.NOTHING,
        "(it does not run)",
        "SIGCONT if it was stopped, mend its storage if it hangs there; else kill it and `hsjournal resume`",
    ),
    _V.NOT_RUNNING: Meaning(
        "the run ended before all of its rows did; time, exit code and reason are told",
        _D.NOTHING,
        "(nobody is there)",
        "what the reason asks for, then `hsjournal resume`",
    ),
}
"""Every verdict has a line."""


def meaning(verdict: Verdict) -> Meaning:
    """The line of a verdict."""
    return MEANINGS[verdict]


def table() -> str:
    """The table in Markdown."""
    lines = ["| verdict | means | what the supervisor does | way out |", "|---|---|---|---|"]
    lines += [f"| `{verdict}` | {m.means} | {m.does} | {m.way_out} |" for verdict, m in MEANINGS.items()]
    return "\n".join(lines)
