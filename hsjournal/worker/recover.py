"""What a new worker finds of its predecessors: finished files, written rows, requests that still run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hsjournal.config import Manifest
from hsjournal.dump import reader
from hsjournal.dump.protocol import RequestId
from hsjournal.errors import HsjournalError
from hsjournal.journal.reading import Reading
from hsjournal.reconcile.gather import gather
from hsjournal.reconcile.plan import Situation
from hsjournal.server.client import ServerClient
from hsjournal.sink.output import Output
from hsjournal.sink.sample import AS_FOUND, OutputSample, Written
from hsjournal.states import State


def written_of(row: dict[str, Any]) -> Written:
    """The file that the journal says was written for ``row``."""
    return Written(
        path=row["output_path"],
        nbytes=row["output_bytes"],
        output_xxh3=row["output_xxh3"],
        source_xxh3=row["source_xxh3"],
        as_found=row["boot_id"] == AS_FOUND,
    )


def sample_of(journal: Reading, row: dict[str, Any], manifest: Manifest) -> OutputSample:
    """What the file of ``row`` must say of itself."""
    claim = journal.claim_of(row["row"])
    rid = RequestId.sample(manifest.run_id, row["row"], row["attempt"], row["num_tokens"])
    return make_sample(manifest, claim.row, claim.sample_id, rid, claim.input_ids, claim.loss_mask)


def make_sample(
    manifest: Manifest, row: int, sample_id: str, rid: RequestId, input_ids: Any, loss_mask: Any
) -> OutputSample:
    """An output sample of this run."""
    return OutputSample(
        row=row,
        sample_id=sample_id,
        run_id=manifest.run_id,
        rid=rid,
        input_ids=input_ids,
        loss_mask=loss_mask.tobytes(),
        capture_layers=manifest.capture_layers,
        final_norm=manifest.final_norm,
        model=manifest.model,
        hidden_size=manifest.hidden_size,
        dtype=manifest.dtype,
    )


def finished_files(
    journal: Reading, output: Output, manifest: Manifest, present: frozenset[str]
) -> dict[int, dict[str, Any]]:
    """Columns of the rows that are ``dumped``, whose dump is gone, and whose file lies whole under its final name.

    Such a row's worker died between publishing and its commit, and the hand-over root was lost too (a reboot).
    """
    found: dict[int, dict[str, Any]] = {}
    for row in journal.rows_in(State.DUMPED):
        sample = sample_of(journal, row, manifest)
        if str(sample.rid) in present:
            continue
        written = output.inspect(sample)
        if written is not None:
            found[row["row"]] = {
                "output_path": written.path,
                "output_bytes": written.nbytes,
                "output_xxh3": written.output_xxh3,
                "source_xxh3": written.source_xxh3,
            }
    return found


def damaged_files(output: Output, rows: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Written rows whose file can't be what was written, with what is wrong: a look at its name and size, not its bytes."""
    found = ((row["row"], output.misfit(row["output_path"], row["output_bytes"])) for row in rows)
    return {row: wrong for row, wrong in found if wrong is not None}


def survey(
    journal: Reading,
    roots: Sequence[int],
    output: Output,
    manifest: Manifest,
    lives: Mapping[str, frozenset[str] | None],
    max_strikes: int | None = None,
    *,
    with_deferred: bool = False,
) -> Situation:
    """What a plan of reconciliation is made from, journal, hand-over root and output together; nothing is changed.

    Args:
        journal: of the run.
        roots: descriptors of the hand-over roots.
        output: of the run.
        manifest: of the run.
        lives: boot ids of the servers that live now, with the request ids that each still works on (None when it does
            not tell).
        max_strikes: strikes that end a row; None ends none.
        with_deferred: look also for the files that are to be read back later; of a large run, there may be many.

    Raises:
        OSError: as the storage answers.
    """
    written = journal.rows_in(State.WRITTEN) if with_deferred else journal.being_written()
    names = [entry for root_fd in roots for entry in reader.list_root(root_fd, manifest.run_id)]
    finished = finished_files(journal, output, manifest, frozenset(e.name for e in names if e.kind == "dump"))
    return gather(
        journal,
        roots,
        manifest,
        lives=lives,
        finished=finished,
        damaged=damaged_files(output, written),
        max_strikes=max_strikes,
        temporaries=output.temporaries(manifest.run_id),
    )


async def in_flight_at(client: ServerClient) -> frozenset[str] | None:
    """Request ids that the server says it works on; None when it does not tell, or does not answer."""
    try:
        info = await client.server_info()
    except HsjournalError:
        return None
    ours = info.get("hsjournal")
    rids = ours.get("in_flight") if isinstance(ours, dict) else None
    return frozenset(map(str, rids)) if isinstance(rids, list) else None
