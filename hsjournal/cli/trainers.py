"""The commands between a run and whoever trains on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hsjournal.cli.options import AsJson, Quiet, RunDir

app = typer.Typer()

Ids = Annotated[Path | None, typer.Option("--ids", help="One sample id a line; - for standard input.")]
Index = Annotated[
    Path | None,
    typer.Option("--index", help="Lines of the run's index (JSON Lines with row and id); - for standard input."),
]

To = Annotated[str, typer.Option("--format", help="Of the new files, as for `run`.")]
Into = Annotated[Path, typer.Option("--out", help="Folder for them: new, empty, or of an earlier call.")]
Parquet = Annotated[bool, typer.Option("--parquet", help="As index.parquet too.")]
DraftVocab = Annotated[
    int, typer.Option("--draft-vocab-size", min=0, help="Write vocab_mapping/ for a draft model with so many tokens.")
]
Vocab = Annotated[int, typer.Option("--vocab-size", min=0, help="Of the target.", show_default="the model's")]


@app.command()
def release(run_dir: RunDir, ids: Ids = None, index: Index = None, as_json: AsJson = False) -> None:
    """Mark verified rows as consumed and free their files, also beside a live run; they stay verified."""
    from hsjournal.config import RunPaths
    from hsjournal.errors import UsageError
    from hsjournal.ops.release import names_of_index, names_of_lines
    from hsjournal.ops.release import release as let_go
    from hsjournal.ui.words import size

    if (ids is None) == (index is None):
        raise UsageError("name the rows to release", remedy="Use --ids FILE or --index FILE (- for standard input).")
    lines = _lines(ids or index or Path("-"))
    wanted = names_of_lines(lines) if index is None else names_of_index(lines, str(index))
    done = let_go(RunPaths.of(run_dir), wanted)
    if as_json:
        print(json.dumps(done.to_json()))
        return
    print(
        f"{done.rows:,} rows released{f' ({done.before:,} had been before)' if done.before else ''}, {size(done.nbytes)} freed; "
        f"{done.released_rows:,} in all"
    )
    for path in done.other:
        print(f"left: {path} is not the file that the journal knows")


@app.command()
def export(run_dir: RunDir, format_: To, out: Into, as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Write a run's verified rows in another trainer's format; the same call again goes on, or adds what is new."""
    from hsjournal.config import RunPaths
    from hsjournal.ops.export import export as write
    from hsjournal.ui.progress import ProgressLine
    from hsjournal.ui.words import duration, printable, size

    with ProgressLine("export", quiet=quiet or as_json) as line:
        done = write(RunPaths.of(run_dir), format_, out, lambda rows, total, _nbytes: line.count("files", rows, total))
    if as_json:
        print(json.dumps(done.to_json()))
    else:
        more = [f"{done.before:,} had been before"] if done.before else []
        more += [f"{done.released:,} were released and have no file"] if done.released else []
        print(
            f"{done.written:,} files written, {size(done.nbytes)} in {duration(done.seconds)}"
            + (f" ({', '.join(more)})" if more else "")
        )
        for damage in done.damaged:
            print(f"DAMAGED row {damage.row} ({printable(damage.sample_id, 60)}): {printable(damage.detail, 300)}")
        if done.damaged:
            print(f"{len(done.damaged):,} left out; see: hsjournal verify {run_dir} --repair")
    raise typer.Exit(int(done.exit_code))


@app.command()
def index(
    run_dir: RunDir,
    parquet: Parquet = False,
    draft_vocab_size: DraftVocab = 0,
    vocab_size: Vocab = 0,
    as_json: AsJson = False,
) -> None:
    """Write the index of the verified files now, and on demand the draft model's vocabulary mapping."""
    from hsjournal.config import RunPaths
    from hsjournal.ops.index import write

    made = write(RunPaths.of(run_dir), parquet=parquet, draft_size=draft_vocab_size, vocab_size=vocab_size)
    if as_json:
        print(json.dumps(made.to_json()))
        return
    print(f"{made.samples:,} samples in {made.index}")
    if made.mapping is not None:
        print(f"{draft_vocab_size:,} tokens cover {made.coverage:.2%} of the loss: {made.mapping}")


def _lines(path: Path) -> list[str]:
    from hsjournal.errors import UsageError

    try:
        if str(path) == "-":
            return sys.stdin.readlines()
        return path.read_text(encoding="utf-8", errors="surrogateescape").split(
            "\n"
        )  # only there: an id may hold U+2028
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}", remedy="Check the path.") from None
