"""The command that answers while everything hangs; the console script does its plain form without typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hsjournal.cli.options import AsJson, Server, seconds
from hsjournal.errors import UsageError

app = typer.Typer()

MaybeRun = Annotated[Path | None, typer.Argument(metavar="[RUN_DIR]", help="A run of ours.")]
Pid = Annotated[int, typer.Option("--pid", min=0, help="A pipeline that isn't ours: its client's process.")]
Log = Annotated[Path | None, typer.Option("--log", help="With --pid: the client's log.")]
Root = Annotated[Path | None, typer.Option("--root", help="With --pid: the folder with the server's `req_N`.")]
StallTimeout = Annotated[
    float,
    typer.Option(
        parser=seconds(1), show_default="5min", metavar="TIME", help="With --pid: so long a silence is a stall."
    ),
]


@app.command()
def diagnose(
    run_dir: MaybeRun = None, pid: Pid = 0, log: Log = None, root: Root = None, server: Server = "",
    stall_timeout: StallTimeout = 300.0, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say in two seconds what a run does, or why it does nothing; read-only, also while every disk is stuck.

    Exit code: 0 nothing to be done, 1 something is, 3 complete with failed samples, 5 a disk or shared memory is full,
    10 no run there or its journal gone, 13 the server.
    """
    from hsjournal.cli.quick import show_diagnosis, show_foreign
    from hsjournal.ops.diagnose.foreign import Pipeline

    if (run_dir is None) == (not pid):
        raise UsageError(
            "name a run directory, or a foreign pipeline's process with --pid",
            remedy="As `hsjournal diagnose RUN_DIR`, or `hsjournal diagnose --pid PID --log FILE --root DIR`.",
        )
    if run_dir is not None:
        raise typer.Exit(show_diagnosis(run_dir, as_json=as_json))
    pipeline = Pipeline(pid, log.absolute() if log else None, root.absolute() if root else None, server, stall_timeout)
    raise typer.Exit(show_foreign(pipeline, as_json=as_json))
