"""``hsjournal prompts check``: look at prompts before a run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hsjournal.cli.options import AsJson, Dtype, Layers, Model, Quiet
from hsjournal.cli.reading import (
    ChatTemplate,
    LastTurnOnly,
    Limit,
    MaxTokens,
    MinLossTokens,
    ShardOf,
    ShuffleSeed,
    TokenizeProcesses,
    Truncate,
    TrustRemoteCode,
    looking,
    said,
)

app = typer.Typer(no_args_is_help=True, help="Look at prompts before a run.")

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files, dataset folders or patterns.")]
Samples = Annotated[int, typer.Option("--samples", min=0, max=1000, help="How many samples to show.")]
Speed = Annotated[float, typer.Option("--tokens-per-s", min=0.001, help="Of the server, for the hours.")]


@app.callback()
def _group() -> None:
    """Look at prompts before a run."""


@app.command()
def check(
    context: typer.Context, files: Files, model: Model = "", max_tokens: MaxTokens = None, truncate: Truncate = False,
    last_turn_only: LastTurnOnly = False, min_loss_tokens: MinLossTokens = None, limit: Limit = None,
    shuffle_seed: ShuffleSeed = None, chat_template: ChatTemplate = None, trust_remote_code: TrustRemoteCode = False, shard: ShardOf = None,
    tokenize_processes: TokenizeProcesses = 0, layers: Layers = "", dtype: Dtype = "", samples: Samples = 5,
    tokens_per_s: Speed = 2500.0, as_json: AsJson = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Read prompts as `run` would, and show what becomes of them: counts, lengths, refused lines, masks of some samples."""
    from hsjournal.errors import ExitCode
    from hsjournal.prompts.check import check as look
    from hsjournal.prompts.spec import Progress
    from hsjournal.ui.progress import ProgressLine
    from hsjournal.ui.prompts import check_text

    spec, facts = looking(files, Path(model) if model else None, said(context), tokenize_processes)
    with ProgressLine("prompts", quiet=quiet or as_json) as line:

        def tell(p: Progress) -> None:
            line.count(
                f"{p.rows:,} rows, {p.tokens:,} tokens, {p.skipped:,} refused; bytes", p.bytes_read, p.bytes_total
            )

        report = look(
            spec,
            facts,
            samples=samples,
            num_aux=len(layers.split(",")) if layers else 3,
            dtype="" if dtype == "auto" else dtype,
            tokens_per_s=tokens_per_s,
            progress=tell,
        )
    found = report.to_json()
    if as_json:
        print(json.dumps(found))
    else:
        print(check_text(found, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    if report.problem:
        print(f"hsjournal: {report.problem}", file=sys.stderr)
        raise typer.Exit(int(ExitCode.USAGE))
