"""Look at the journal and the hand-over root, and say what is there; nothing is changed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hsjournal.config import Manifest
from hsjournal.dump import reader
from hsjournal.dump.protocol import RequestId, token_ids_sha256
from hsjournal.dump.unpublished import outgrow_birth, take_abandoned
from hsjournal.errors import DumpRejectedError, Reject
from hsjournal.journal.reading import Reading
from hsjournal.reconcile.plan import RowView, Situation
from hsjournal.states import DEFERRED, State

_UNCHECKED = (State.PENDING, State.SENT, State.DUMPED)
"""States in which a row's dump has yet to serve."""


def gather(
    journal: Reading,
    roots: Sequence[int],
    manifest: Manifest,
    *,
    lives: Mapping[str, frozenset[str] | None] | None = None,
    finished: Mapping[int, Mapping[str, Any]] | None = None,
    damaged: Mapping[int, str] | None = None,
    max_strikes: int | None = None,
    temporaries: Sequence[str] = (),
) -> Situation:
    """Everything a plan is made from.

    Args:
        journal: of the run.
        roots: descriptors of the hand-over roots.
        manifest: of the run.
        lives: boot ids of the servers that live now, with the request ids that each still works on (None when it does
            not tell).
        finished: values of rows whose file lies whole under its final name though the journal says ``dumped``.
        damaged: written rows whose file can't be what was written, with what is wrong.
        max_strikes: strikes that end a row; None ends none.
        temporaries: hidden temporaries of this run in the output folder.
    """
    run_id = manifest.run_id
    entries = [entry for root_fd in roots for entry in reader.list_root(root_fd, run_id)]
    under_way = [r for state in (State.SENT, State.DUMPED) for r in journal.rows_in(state)] + journal.being_written()
    rows = {r["row"]: _view(r) for r in under_way}
    named = {e.rid.row for e in entries if e.rid is not None and e.rid.row is not None} - rows.keys()
    rows |= {r["row"]: _view(r) for r in journal.rows_of(sorted(named | (damaged or {}).keys()))}
    verdicts: dict[str, tuple[Reject, str] | None] = {}
    for entry in entries:
        if entry.kind == "dump" and entry.rid is not None and entry.rid.row is not None:
            view = rows.get(entry.rid.row)
            if view is not None and view.rid(run_id) == entry.name and view.may_have_dump and view.state in _UNCHECKED:
                verdicts[entry.name] = _verdict(journal, root_of(roots, entry.name), entry.rid, manifest)
    return Situation(
        run_id=run_id,
        rows=rows,
        entries=entries,
        verdicts=verdicts,
        finished=finished or {},
        damaged=damaged or {},
        abandoned=frozenset(_abandoned(roots, entries)),
        lives=lives or {},
        max_strikes=max_strikes,
        temporaries=tuple(temporaries),
    )


def root_of(roots: Sequence[int], name: str) -> int:
    """The root that holds ``name``; request ids are unique over all servers of a run. The first when none does."""
    for root_fd in roots:
        try:
            os.stat(name, dir_fd=root_fd, follow_symlinks=False)
        except OSError:
            continue
        return root_fd
    return roots[0]


def expectation(manifest: Manifest, rid: RequestId, input_ids: Any, boot_id: str | None = None) -> reader.Expectation:
    """What the dump of ``rid`` must be. ``boot_id`` None takes any life of the server."""
    return reader.Expectation(
        rid=rid,
        num_tokens=len(input_ids),
        hidden_size=manifest.hidden_size,
        dtype=manifest.dtype,
        capture_layers=manifest.capture_layers,
        final_norm=manifest.final_norm,
        token_ids_sha256=token_ids_sha256(input_ids),
        boot_id=boot_id,
    )


def _view(row: Mapping[str, Any]) -> RowView:
    return RowView(
        row=row["row"],
        state=State(row["state"]),
        attempt=row["attempt"],
        num_tokens=row["num_tokens"],
        strikes=row["strikes"],
        boot_id=row["boot_id"],
        rejected=(row["reason"] or "").partition(":")[0] in set(Reject),
        deferred=row["verify_method"] == DEFERRED,
    )


def _verdict(journal: Reading, root_fd: int, rid: RequestId, manifest: Manifest) -> tuple[Reject, str] | None:
    if rid.row is None:
        return Reject.WRONG_IDENTITY, "a probe"
    expect = expectation(manifest, rid, journal.claim_of(rid.row).input_ids)
    try:
        reader.open_dump(root_fd, rid, expect).close()
    except DumpRejectedError as error:
        return error.reason, error.detail
    except OSError as error:  # of another user, or on a failing disk: of no use, and nobody's strike
        return Reject.VANISHED, f"{rid} can't be opened: {error.strerror}"
    return None


def _abandoned(roots: Sequence[int], entries: Sequence[reader.Entry]) -> Iterator[str]:
    """Unpublished folders that no writer holds."""
    unpublished = [(root_of(roots, e.name), e.name) for e in entries if e.kind == "tmp"]
    for root_fd in {root_fd for root_fd, _ in unpublished}:
        outgrow_birth(root_fd, [name for at, name in unpublished if at == root_fd])
    for root_fd, name in unpublished:
        with contextlib.suppress(OSError):
            folder = take_abandoned(root_fd, name, fcntl.LOCK_SH)
            if folder is not None:
                os.close(folder)
                yield name
