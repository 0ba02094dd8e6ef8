"""The options that say how prompts are read: for every command that reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsjournal.prompts.spec import Reading

if TYPE_CHECKING:
    from hsjournal.prompts.check import ModelFacts
    from hsjournal.prompts.spec import IngestSpec

MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Refuse longer rows.", show_default="as many as the server takes whole"),
]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut rows that are too long instead of refusing them.")]
LastTurnOnly = Annotated[
    bool, typer.Option("--last-turn-only", help="Only the assistant's last turn counts for the loss.")
]
MinLossTokens = Annotated[
    int | None,
    typer.Option("--min-loss-tokens", min=0, help="Refuse rows with fewer tokens that count.", show_default="1"),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Take only so many rows, refused ones included.")]
ShuffleSeed = Annotated[
    int | None, typer.Option("--shuffle-seed", help="Put the rows in an order drawn from this number.")
]
ChatTemplate = Annotated[
    Path | None, typer.Option("--chat-template", metavar="FILE", help="Use this chat template, not the model's.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the tokenizer run Python code of the model's folder.")
]
ShardOf = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Only the I-th of N shards, by a hash of the ids; numbers stay."),
]
TokenizeProcesses = Annotated[
    int, typer.Option("--tokenize-processes", min=0, max=256, help="0: as many as there are processors.")
]


def said(context: typer.Context) -> dict[str, Any]:
    """What a command was told of how prompts are read; nothing of what it was not told."""
    found = {name: context.params.get(name) for name in Reading.__dataclass_fields__}
    template = found["chat_template"]
    if template is not None:
        found["chat_template"] = str(Path(template).absolute())
    return {name: value for name, value in found.items() if value is not None and value is not False}


def looking(
    files: Sequence[Path], model: Path | None, reading: dict[str, Any], processes: int
) -> tuple[IngestSpec, ModelFacts | None]:
    """What to read, and how, to look at prompts without a run.

    Raises:
        PromptsError: when a file is not there.
    """
    from hsjournal.prompts.check import ModelFacts
    from hsjournal.prompts.ingest import without_torch
    from hsjournal.prompts.sources import expand
    from hsjournal.prompts.spec import IngestSpec

    without_torch()
    facts = ModelFacts.of(model) if model else None
    spec = IngestSpec(
        run_id="check",
        files=tuple(expand(list(files))),
        model_dir=os.path.abspath(model) if model else None,
        max_tokens=(facts.context_length if facts else None) or 1 << 20,
        vocab_size=facts.vocab_size if facts else None,
        reading=Reading(**reading),
        processes=processes,
    )
    return spec, facts
