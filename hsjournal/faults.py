"""Named fault points: where a drill may kill, stop, delay or fail the product itself.

A step that matters calls ``faults.point("sink.linked")``. Without ``HSJOURNAL_FAULTS`` in the environment this is
one comparison. With it, the named points act::

    HSJOURNAL_FAULTS = (
        "sink.linked=kill@3; journal.committing=delay:0.5; sink.writing=errno:ENOSPC; sink.opened=segv,row:7"
    )

``@n`` acts on the n-th passage only (and not again in that process); ``row:N`` passes only for that row, at points
that know theirs; ``once:FILE`` acts only if it can unlink FILE, so that a restarted process does not act again; and
``while:FILE`` acts only as long as FILE is there. A point may be armed more than once.

Actions: ``kill`` (SIGKILL to itself), ``stop`` (SIGSTOP), ``exit`` (status 70), ``segv`` and ``abort`` (a native crash),
``raise`` (an exception that nobody expects), ``delay:SECONDS``, ``errno:NAME`` (OSError), ``stuck:FIFO`` (the thread
waits in the kernel, uninterruptible but killable, until somebody opens the FIFO).
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass

from hsjournal.errors import UsageError

VARIABLE = "HSJOURNAL_FAULTS"

POINTS = (
    "capture.writing",  # server: between two tensors of a dump
    "capture.publishing",  # server: everything written, before the rename that publishes
    "capture.published",
    "worker.claiming",  # before the commit of pending → sent
    "worker.sent_committed",  # after it, before the request leaves
    "worker.requested",  # the request has left
    "worker.dump_seen",  # the dump was found, before the commit of sent → dumped
    "worker.dumped_committed",
    "sink.opened",  # nameless or hidden temporary open, nothing written
    "sink.writing",  # between two buffers
    "sink.written",  # all bytes written, before fdatasync
    "sink.synced",  # data durable, before the epoch is looked at
    "sink.linking",  # the epoch was found good, before the link that publishes
    "sink.linked",  # after it, before fsync of the directory
    "sink.published",  # directory fsynced, before the commit of dumped → written
    "worker.written_committed",
    "verify.reading",
    "verify.done",  # before the commit of written → verified
    "worker.verified_committed",  # before the dump is deleted
    "reap.deleting",  # between two files of a dump that is being deleted
    "reap.deleted",
    "journal.committing",  # statements done, COMMIT not yet sent
    "reconcile.applying",  # between two steps of a reconcile plan
    "migrate.step",  # inside a migration
    "ingest.batch",  # between two batches of prompts
    "prepare.finishing",  # all prompts are in, the manifest that makes it a run is not written yet
)


ACTIONS = ("kill", "stop", "exit", "segv", "abort", "raise", "delay", "errno", "stuck")


class InjectedError(Exception):
    """What ``raise`` raises: no error of ours, as a bug's would not be."""


@dataclass(slots=True)
class _Fault:
    action: str
    argument: str
    passage: int | None
    row: int | None
    once: str | None
    holding: str | None
    seen: int = 0


def _parse(text: str) -> dict[str, list[_Fault]]:
    faults: dict[str, list[_Fault]] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        name, _, rest = item.partition("=")
        if name not in POINTS or not rest:
            raise UsageError(
                f"{VARIABLE} names no fault point: {item!r}", remedy="See hsjournal/faults.py for the names."
            )
        head, *options = rest.split(",")
        action, _, nth = head.partition("@")
        action, _, argument = action.partition(":")
        said = dict(option.split(":", 1) for option in options if ":" in option)
        if action not in ACTIONS or len(said) < len(options) or said.keys() - {"once", "while", "row"}:
            raise UsageError(f"{VARIABLE} names no action: {item!r}", remedy="See hsjournal/faults.py for the actions.")
        row = int(said["row"]) if "row" in said else None
        fault = _Fault(action, argument, int(nth) if nth else None, row, said.get("once"), said.get("while"))
        faults.setdefault(name, []).append(fault)
    return faults


_faults = _parse(os.environ.get(VARIABLE, ""))
_lock = threading.Lock()


def point(name: str, row: int | None = None) -> None:
    """Pass the fault point ``name``, for ``row`` where one is known; acts only if the environment armed it.

    Raises:
        OSError: when the point is armed with ``errno:NAME``.
        InjectedError: when it is armed with ``raise``.
    """
    if not _faults:
        return
    for fault in _faults.get(name, ()):
        if _is_due(fault, row):
            _act(name, fault)


def _is_due(fault: _Fault, row: int | None) -> bool:
    with _lock:
        if fault.row is not None and fault.row != row:
            return False
        if fault.holding is not None and not os.path.exists(fault.holding):
            return False
        fault.seen += 1
        if fault.passage is not None and fault.seen != fault.passage:
            return False
        if fault.once is not None:
            try:
                os.unlink(fault.once)
            except FileNotFoundError:
                return False
    return True


def _act(name: str, fault: _Fault) -> None:
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":  # sent to this thread: one sent to the process may let it run on for a while
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "exit":
            os._exit(70)
        case "segv":
            signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)
        case "abort":
            os.abort()
        case "raise":
            raise InjectedError(f"fault point {name}")
        case "delay":
            time.sleep(float(fault.argument))
        case "stuck":
            _wait_in_kernel(fault.argument)
        case "errno":
            code = int(getattr(errno, fault.argument))
            raise OSError(code, f"{os.strerror(code)} (fault point {name})")


def _wait_in_kernel(fifo: str) -> None:
    """Start a child that opens ``fifo`` before it execs: as long as it blocks there, the kernel keeps this thread in D.

    By way of ctypes, which lets go of the interpreter meanwhile, so that all other threads work on as if nothing were.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    actions = ctypes.create_string_buffer(512)  # posix_spawn_file_actions_t, which is smaller than that everywhere
    libc.posix_spawn_file_actions_init(actions)
    libc.posix_spawn_file_actions_addopen(actions, 1, os.fsencode(fifo), os.O_WRONLY, 0)
    argv = (ctypes.c_char_p * 2)(b"true", None)
    pid = ctypes.c_int()
    if libc.posix_spawn(ctypes.byref(pid), b"/bin/true", actions, None, argv, None) == 0:
        os.waitpid(pid.value, 0)
