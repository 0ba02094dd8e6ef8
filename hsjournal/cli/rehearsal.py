"""``run --dry-run`` and ``resume --dry-run``: every check that needs no server, and what would be done; nothing is changed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hsjournal.cli import job
from hsjournal.cli.beginning import begin, free_room
from hsjournal.cli.reading import looking
from hsjournal.cli.servers import layer_numbers
from hsjournal.config import RunPaths
from hsjournal.errors import ExitCode, UsageError
from hsjournal.prompts.forecast import refuse_too_little
from hsjournal.states import INCOMPLETE, State

_TOKENS_PER_S = 2500.0
"""For the hours, as ``prompts check`` has it by default."""


def rehearse(run_dir: Path, options: job.Options) -> int:
    """Print what ``run`` would do with these arguments; the exit code that its refusal would have.

    Raises:
        UsageError, PromptsError, NoJournalError, SchemaError: as the command itself would.
    """
    paths = RunPaths.of(run_dir)
    if paths.manifest.exists():
        return _old(paths, options)
    job.may_be_made(paths, options)
    return _new(paths, options)


def _old(paths: RunPaths, options: job.Options) -> int:
    from hsjournal.ops.reconcile import reconcile
    from hsjournal.ui.operate import reconcile_text
    from hsjournal.watch.children import peek_at

    job.check(paths, options)
    counts = {state: c["rows"] for state, c in peek_at(paths.journal)["counts"].items()}
    left = sum(counts[state] for state in INCOMPLETE)
    root = options.handover_roots[0] if options.handover_roots else None
    found = reconcile(paths, dry_run=True, handover_root=root, server=next(iter(options.servers), ""))
    print(reconcile_text(found.to_json(), str(paths.run_dir)))
    print(f"{counts[State.VERIFIED]:,} rows are verified; {left:,} are not complete and would be gone on with")
    return int(ExitCode.DONE)


def _new(paths: RunPaths, options: job.Options) -> int:
    from hsjournal.prompts.check import check as look
    from hsjournal.ui.prompts import check_text

    adopting = next((f.absolute() for f in options.adopt_from if any(names for _, _, names in os.walk(f))), None)
    found = begin(paths, replace(options, adopting=adopting), rehearse=True)
    model = Path(found.servers.model) if found.servers.model else None
    spec, facts = looking(options.prompts or [], model, options.reading, options.tokenize_processes)
    num_aux = len(layer_numbers(options.layers)) if options.layers else 3
    dtype = "" if options.dtype == "auto" else options.dtype
    report = look(spec, facts, samples=0, num_aux=num_aux, dtype=dtype, tokens_per_s=_TOKENS_PER_S)
    print(check_text(report.to_json(), colour=False))
    if report.problem:
        raise UsageError(report.problem, remedy="Mend what is told of above, or name other files with --prompts.")
    needed = report.expected["output_bytes"] if report.expected else 0
    if adopting is None and not options.allow_little_room:
        refuse_too_little(needed, free_room(found.out_dirs), found.out_dirs)
    if adopting is not None:
        print(f"what lies in {adopting} would be taken over first, and need not be computed again")
    where = ", ".join(map(str, found.out_dirs))
    print(f"a run would be made in {paths.run_dir}, with its output in {where}; nothing was changed")
    return int(ExitCode.DONE)
