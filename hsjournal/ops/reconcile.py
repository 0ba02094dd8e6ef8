"""The plan of reconciliation without a run: shown, and on demand carried out."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsjournal.config import Manifest, RunPaths
from hsjournal.dump import reader
from hsjournal.events import Event
from hsjournal.journal.locks import is_held
from hsjournal.journal.reading import JournalReader, Reading
from hsjournal.ops.custody import Custody, custody, need_output
from hsjournal.reconcile.apply import apply
from hsjournal.reconcile.plan import Plan, plan
from hsjournal.server.launch import fetch_json
from hsjournal.sink.output import Output
from hsjournal.worker.recover import survey

_PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class ServerLife:
    """What one of the run's servers says of itself; all None when there is none, or it does not answer."""

    url: str | None = None
    boot_id: str | None = None
    in_flight: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Reconciled:
    """A plan, and what became of it.

    Args:
        plan: made from what was there.
        applied: whether it was carried out.
        freed_bytes: in the hand-over roots.
        servers: as they were asked.
        roots: the hand-over roots looked at.
        live: the run was going on meanwhile (only possible without applying): its own steps show up in the plan.
    """

    plan: Plan
    applied: bool
    freed_bytes: int
    servers: tuple[ServerLife, ...]
    roots: tuple[Path, ...]
    live: bool

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return self.plan.summary() | {
            "applied": self.applied,
            "freed_bytes": self.freed_bytes,
            "server": next((life.url for life in self.servers if life.boot_id), None),
            "servers": [life.url for life in self.servers if life.boot_id],
            "handover_root": str(self.roots[0]),
            "handover_roots": [str(root) for root in self.roots],
            "live": self.live,
            "plan": list(self.plan.lines()),
        }


def reconcile(paths: RunPaths, *, dry_run: bool, handover_root: Path | None = None, server: str = "") -> Reconciled:
    """Bring journal, hand-over root and output together; with ``dry_run`` only say what that would take.

    Args:
        paths: of the run.
        dry_run: change nothing; this also works beside a live run.
        handover_root: the run's own if None.
        server: address; the run's own servers if empty. A server that does not answer is taken for dead.

    Raises:
        NoJournalError: when there is no run.
        JournalLockedError: unless ``dry_run``, when the run is going on.
        HsjournalError: when the output folder is not there.
    """
    manifest = Manifest.load(paths.manifest)
    for folder in manifest.out_dirs:
        need_output(Path(folder))
    endpoints = manifest.endpoints
    roots = [handover_root] if handover_root else sorted({Path(e.handover_root) for e in endpoints})
    lives = [ask(url) for url in ([server] if server else [e.url for e in endpoints])]
    with ExitStack() as stack:
        fds = [stack.enter_context(_opened(root)) for root in roots]
        if dry_run:
            live = is_held(paths.supervisor_lock) or is_held(paths.worker_lock)
            with JournalReader(paths.journal) as journal, closing(Output(manifest, paths.rejects)) as output:
                made = _plan(journal, fds, output, manifest, lives)
            return Reconciled(made, applied=False, freed_bytes=0, servers=tuple(lives), roots=tuple(roots), live=live)
        held = stack.enter_context(custody(paths))
        made, freed = _carry_out(held, fds, lives)
        return Reconciled(made, applied=True, freed_bytes=freed, servers=tuple(lives), roots=tuple(roots), live=False)


def _carry_out(held: Custody, roots: Sequence[int], lives: Sequence[ServerLife]) -> tuple[Plan, int]:
    """Make the plan and apply it; an empty one changes not even the epoch."""
    with closing(Output(held.manifest, held.paths.rejects)) as output:
        made = _plan(held.journal, roots, output, held.manifest, lives)
    if made.is_empty:
        return made, 0
    epoch = held.take_epoch("reconcile")
    if made.moves:
        held.journal.reopen(epoch)  # a written row of a finished run may be pending again
    events: list[Event] = []
    try:
        freed = apply(made, held.journal, epoch, roots, held.paths.rejects, held.out_dir, events.append)
    finally:
        held.journal.apply([], epoch, [*events, Event("reconciled_root", None, made.summary())])
    return made, freed


def _plan(
    journal: Reading, roots: Sequence[int], output: Output, manifest: Manifest, lives: Sequence[ServerLife]
) -> Plan:
    living = {life.boot_id: life.in_flight for life in lives if life.boot_id is not None}
    # A refused dump is a strike here too, but only the run's own worker knows how many end a row.
    return plan(survey(journal, roots, output, manifest, living, with_deferred=True))


def ask(url: str) -> ServerLife:
    """The life of the server at ``url``; nothing of it when it does not answer."""
    if not url:
        return ServerLife()
    try:
        ours = fetch_json(url.rstrip("/") + "/server_info", _PATIENCE).get("hsjournal") or {}
    except (OSError, ValueError):
        return ServerLife(url)
    rids = ours.get("in_flight")
    in_flight = frozenset(map(str, rids)) if isinstance(rids, list) else None
    return ServerLife(url, ours.get("boot_id"), in_flight)


@contextlib.contextmanager
def _opened(root: Path) -> Iterator[int]:
    """A descriptor of the root; of an empty folder when there is none, as after a reboot."""
    with contextlib.ExitStack() as stack:
        try:
            fd = reader.open_root(root)
        except FileNotFoundError:
            fd = reader.open_root(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hsjournal-"))))
        stack.callback(os.close, fd)
        yield fd
