"""The commands that check or change a run besides running it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from hsjournal.cli import diagnosing
from hsjournal.cli.options import (
    AsJson,
    DryRun,
    Dtype,
    Format,
    Handover,
    Layers,
    LittleRoom,
    Model,
    Out,
    Port,
    Prompts,
    Quiet,
    RunDir,
    Server,
)
from hsjournal.cli.reading import (
    ChatTemplate,
    LastTurnOnly,
    Limit,
    MaxTokens,
    MinLossTokens,
    ShuffleSeed,
    Truncate,
    TrustRemoteCode,
    said,
)
from hsjournal.errors import UsageError

app = typer.Typer()
app.add_typer(diagnosing.app)

Subset = Annotated[str, typer.Option("--subset", help="Not all rows: a part as 1/5, a share as 2%, a size as 50GiB.")]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Of the draw for a share or a size; by the clock if not given.")
]
RepairFlag = Annotated[
    bool, typer.Option("--repair", help="Set damaged files aside and make their rows pending again.")
]
Rows = Annotated[list[int] | None, typer.Argument(metavar="[ROW]...", help="Row numbers, as `status` shows them.")]
AllFailed = Annotated[bool, typer.Option("--all", help="Every failed row.")]
DoubtedRows = Annotated[
    bool, typer.Option("--doubted", help="Every row since the last good canary; their files go to RUN_DIR/rejects.")
]
Reason = Annotated[str, typer.Option("--reason", help="Kept with the rows.")]
Dumps = Annotated[Path | None, typer.Option("--dumps", help="A v1 server's folder of `req_N` directories.")]
Outputs = Annotated[
    Path | None, typer.Option("--outputs", help="The folder with the files to take over; it is only read.")
]
LayersChecked = Annotated[
    str,
    typer.Option("--layers-checked", help="You vouch that the files hold these layers, as 1,5,8; nothing is compared."),
]
Compare = Annotated[
    int, typer.Option("--compare", min=0, help="So many samples are run again and held against the files.")
]
Link = Annotated[
    bool,
    typer.Option("--link", help="Share the files' bytes (reflink, else hard link) where they can stay as they are."),
]


Logits = Annotated[
    int,
    typer.Option(
        "--logits",
        min=0,
        help="Instead: hold so many samples against the model itself, by the next tokens' probabilities.",
    ),
]
LogitsServer = Annotated[
    str,
    typer.Option(
        "--logits-server",
        metavar="URL",
        help="With --logits: hold final states against this server's own probabilities, without loading the model.",
    ),
]


@app.command()
def verify(
    run_dir: RunDir, subset: Subset = "", repair: RepairFlag = False, seed: Seed = None, logits: Logits = 0,
    logits_server: LogitsServer = "", model: Model = "", as_json: AsJson = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Read the outputs back from their storage and name every damage; exit code 3 when there is some."""
    if logits:
        draw = time.time_ns() if seed is None else seed
        raise typer.Exit(_examine(run_dir, logits, draw, model, logits_server, as_json=as_json))
    if logits_server:
        from hsjournal.errors import UsageError

        raise UsageError("--logits-server is for --logits", remedy="Say how many samples with --logits N.")
    from hsjournal.config import RunPaths
    from hsjournal.ops.subset import Subset as Choice
    from hsjournal.ops.verify import verify as check
    from hsjournal.ops.verify_report import Progress
    from hsjournal.ui.operate import verify_text
    from hsjournal.ui.progress import ProgressLine

    choice = Choice.parse(subset)
    with ProgressLine("verify", quiet=quiet or as_json) as line:

        def tell(p: Progress) -> None:
            line.show(p.rows, p.total_rows, p.nbytes, p.total_bytes, f"{p.damaged:,} damaged")

        draw = time.time_ns() if seed is None else seed
        report = check(RunPaths.of(run_dir), choice, seed=draw, repair=repair, tell=tell)
    found = report.to_json() | {"subset": subset}
    print(json.dumps(found) if as_json else verify_text(found, str(run_dir)))
    raise typer.Exit(int(report.exit_code))


def _examine(run_dir: Path, most: int, seed: int, model: str, server: str, *, as_json: bool) -> int:
    from hsjournal.config import RunPaths
    from hsjournal.ops.logits import examine
    from hsjournal.ui.operate import logits_text

    found = examine(RunPaths.of(run_dir), most, seed=seed, model=model, server=server)
    print(json.dumps(found.to_json()) if as_json else logits_text(found.to_json()))
    return int(found.exit_code)


@app.command()
def retry(
    run_dir: RunDir, rows: Rows = None, every: AllFailed = False, doubted: DoubtedRows = False, reason: Reason = "",
    dry_run: DryRun = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Try failed rows again, with their strikes forgiven; or make rows again that a failed canary put in doubt."""
    from hsjournal.config import RunPaths
    from hsjournal.errors import UsageError
    from hsjournal.ops.doubted import make_again
    from hsjournal.ops.retry import retry as put_back

    if bool(rows) + every + doubted != 1:
        raise UsageError(
            "name the rows to try again, or --all, or --doubted", remedy="`hsjournal status` shows the failed ones."
        )
    paths = RunPaths.of(run_dir)
    if doubted:
        done = make_again(paths, dry_run=dry_run)
    else:
        done = put_back(paths, None if every else rows, reason, dry_run=dry_run)
    if as_json:
        print(json.dumps({"retried": 0 if dry_run else len(done.rows), "rows": list(done.rows)}))
    elif dry_run:
        print(f"{len(done.rows):,} rows would be pending again: {', '.join(map(str, done.rows[:50])) or 'none'}")
    elif done.rows:
        what = "rows in doubt" if doubted else "failed rows"
        print(f"{len(done.rows):,} {what} are pending again; go on with: hsjournal resume {run_dir}")
    else:
        print(f"no row is {'in doubt' if doubted else 'failed'}: nothing to do")


@app.command()
def reconcile(
    run_dir: RunDir,
    dry_run: DryRun = False,
    handover_root: Handover = None,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Make journal, hand-over root and output agree after a crash, without running; the next run does it too."""
    from hsjournal.config import RunPaths
    from hsjournal.ops.reconcile import reconcile as agree
    from hsjournal.ui.operate import reconcile_text

    root = Path(handover_root).absolute() if handover_root else None
    found = agree(RunPaths.of(run_dir), dry_run=dry_run, handover_root=root, server=server).to_json()
    print(json.dumps(found) if as_json else reconcile_text(found, str(run_dir)))


@app.command()
def adopt(
    context: typer.Context, run_dir: RunDir, outputs: Outputs = None, dumps: Dumps = None, dry_run: DryRun = False,
    prompts: Prompts = None, server: Server = "", model: Model = "", out: Out = None,
    format_: Format = "", layers: Layers = "", dtype: Dtype = "", handover_root: Handover = None, port: Port = 0,
    layers_checked: LayersChecked = "", compare: Compare = 3, link: Link = False, allow_little_room: LittleRoom = False,
    max_tokens: MaxTokens = None, truncate: Truncate = False, last_turn_only: LastTurnOnly = False,
    min_loss_tokens: MinLossTokens = None, limit: Limit = None, shuffle_seed: ShuffleSeed = None,
    chat_template: ChatTemplate = None, trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Take over finished files of an extraction that has no journal; a new RUN_DIR is made first, as `run` would.

    With --dumps: complete `req_N` directories of a v1 server, into the rows of RUN_DIR that they match without ambiguity.
    """
    from hsjournal.cli.adopting import Asked, take_over

    if (outputs is None) == (dumps is None):
        raise UsageError("name either finished files or dumps", remedy="As --outputs DIR, or --dumps DIR.")
    if outputs is None:
        assert dumps is not None
        _drain(run_dir, dumps.absolute(), dry_run=dry_run, as_json=as_json)
        return
    if dry_run:
        raise UsageError(
            "--dry-run goes with --dumps", remedy="Leave it out: --outputs never changes the files that it reads."
        )
    asked = Asked(
        run_dir=run_dir, outputs=outputs, prompts=prompts, server=server, model=model, out=out, format=format_,
        layers=layers, dtype=dtype, handover_root=handover_root, port=port, layers_checked=layers_checked,
        compare=compare, link=link, allow_little_room=allow_little_room, reading=said(context),
    )  # fmt: skip
    raise typer.Exit(take_over(asked, as_json=as_json, quiet=quiet))


def _drain(run_dir: Path, dumps: Path, *, dry_run: bool, as_json: bool) -> None:
    from hsjournal.config import RunPaths
    from hsjournal.ops.draining import drain
    from hsjournal.ui.operate import drained_text

    found = drain(RunPaths.of(run_dir), dumps, dry_run=dry_run).to_json()
    print(json.dumps(found) if as_json else drained_text(found, str(run_dir)))
