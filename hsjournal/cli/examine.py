"""The commands that look at a run and its machine, and change nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from hsjournal.cli.options import (
    ApiKeyFile,
    AsJson,
    Budget,
    MetricsEvery,
    MetricsFile,
    MetricsHost,
    MetricsPort,
    RunDir,
    nbytes,
)

app = typer.Typer()
_REPORT_DEADLINE = 120.0

MaybeRun = Annotated[
    Path | None, typer.Argument(metavar="[RUN_DIR]", help="The run that is, or is to be; without it the machine only.")
]
Outs = Annotated[list[Path] | None, typer.Option("--out", help="Output folder; repeatable.", show_default="the run's")]
Root = Annotated[
    Path | None,
    typer.Option("--handover-root", help="Shared with the server.", show_default="the run's, under /dev/shm"),
]
Servers = Annotated[
    list[str] | None, typer.Option("--server", help="A server's address; repeatable.", show_default="the run's")
]
Largest = Annotated[
    int,
    typer.Option(
        "--largest",
        parser=nbytes,
        metavar="SIZE",
        show_default="by the journal",
        help="The largest sample's bytes in the hand-over root, as 2GiB.",
    ),
]


@app.command()
def doctor(
    context: typer.Context,
    run_dir: MaybeRun = None, out: Outs = None, handover_root: Root = None, handover_budget: Budget = 64 << 30,
    server: Servers = None, api_key_file: ApiKeyFile = None, largest: Largest = 0, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Will this machine carry the run? Versions, limits, disks, shared memory, servers; exit code 1 if something fails."""
    from rich.console import Console

    from hsjournal.cli.secret import take_key
    from hsjournal.config import RunPaths
    from hsjournal.ops.doctor.examination import Subject, examine
    from hsjournal.ops.doctor.lines import Level
    from hsjournal.ui.doctor import show

    take_key(api_key_file)
    source = context.get_parameter_source("handover_budget")
    lines = examine(
        Subject(
            paths=RunPaths.of(run_dir) if run_dir is not None else None,
            out=tuple(folder.absolute() for folder in out or ()),
            handover_root=handover_root.absolute() if handover_root else None,
            budget=0 if source is not None and source.name == "DEFAULT" else handover_budget,
            largest=largest,
            servers=tuple(server or ()),
            api_key=os.environ.get("HSJOURNAL_API_KEY", ""),
        )
    )
    found = [line.to_json() for line in lines]
    if as_json:
        print(json.dumps({"version": 1, "lines": found}))
    else:
        show(found, Console(highlight=False))
    raise typer.Exit(int(any(line.level is Level.FAIL for line in lines)))


Page = Annotated[
    Path | None, typer.Option("--to", help="The page's file.", show_default="NAME-report.html in this folder")
]


@app.command()
def report(run_dir: RunDir, to: Page = None, as_json: AsJson = False) -> None:
    """Write one self-contained HTML page about a run, finished or not; --json prints the facts behind it instead."""
    from hsjournal import __version__
    from hsjournal.config import RunPaths
    from hsjournal.errors import UsageError
    from hsjournal.ui.report.page import page
    from hsjournal.watch.children import ask, module

    paths = RunPaths.of(run_dir)
    facts = ask(module("hsjournal.ops.report.gather", str(paths.run_dir)), _REPORT_DEADLINE)
    if as_json:
        print(json.dumps({"version": 1} | facts))
        return
    file = to or Path(f"{paths.run_dir.name or 'run'}-report.html")
    if file.is_dir():
        raise UsageError(f"{file} is a folder", remedy="Name a file with --to.")
    file.write_text(page(facts, str(paths.run_dir), __version__))
    print(f"written to {file}")


@app.command()
def metrics(
    run_dir: RunDir,
    port: MetricsPort = -1,
    host: MetricsHost = "127.0.0.1",
    textfile: MetricsFile = None,
    every: MetricsEvery = 15.0,
) -> None:
    """Figures for Prometheus beside a run: an endpoint, a text file, or both; with neither they are printed once."""
    from hsjournal.config import RunPaths
    from hsjournal.errors import NoJournalError
    from hsjournal.ops.metrics import exposition, serve

    paths = RunPaths.of(run_dir)
    if port >= 0 or textfile is not None:
        serve(paths, host, port, textfile.absolute() if textfile else None, every)
        return
    if not paths.mirror.is_dir():
        raise NoJournalError(
            f"nothing runs in {run_dir}", remedy="Metrics are of runs that go on; see `hsjournal status`."
        )
    print(exposition(paths), end="")


Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with those that come, until the run ends.")]
Kinds = Annotated[list[str] | None, typer.Option("--kind", help="Only this kind, as stall; repeatable.")]


@app.command()
def events(run_dir: RunDir, follow: Follow = False, kind: Kinds = None) -> None:
    """Print the run's events as JSON Lines: what happened besides the forward steps of rows, oldest first."""
    from hsjournal.config import RunPaths
    from hsjournal.ops.happened import Happened
    from hsjournal.watch.onlooker import Onlooker

    paths = RunPaths.of(run_dir)
    happened = Happened(paths)
    for event in happened.so_far():
        if not kind or event.kind in kind:
            print(event.to_json(), flush=follow)
    onlooker = Onlooker(paths)
    for fresh in happened.from_now_on() if follow else ():
        if fresh is None:
            if not onlooker.is_going_on:
                return
        elif not kind or fresh.kind in kind:
            print(fresh.to_json(), flush=True)
