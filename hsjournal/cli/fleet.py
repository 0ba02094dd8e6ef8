"""``hsjournal fleet``: shards on many machines."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hsjournal.cli.options import AsJson, Plain, Quiet, seconds

app = typer.Typer(help="Shards of a run on many machines, by Ray or Slurm.", no_args_is_help=True)

PASSED_ON: dict[Any, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders of them.")]
RayAddress = Annotated[str, typer.Option("--ray", metavar="HOST:PORT", help="The head of a Ray cluster.")]
Slurm = Annotated[bool, typer.Option("--slurm", help="An array job, submitted from here.")]
Shards = Annotated[int, typer.Option("--shards", min=1, max=100_000, help="How many; the same at every start.")]
Base = Annotated[
    str, typer.Option("--base", help="Local folder on each node for run directories; '$NAME' is the node's variable.")
]
Name = Annotated[str, typer.Option("--name", help="Of the fleet, the same at every start.")]
SharedOut = Annotated[
    str | None, typer.Option("--out", help="Shared folder for the outputs.", show_default="inside the run directories")
]
AdoptFrom = Annotated[
    list[str] | None,
    typer.Option("--adopt-from", help="Outputs of earlier starts, where a node can reach them; repeatable."),
]
Store = Annotated[
    str, typer.Option("--store", help="Shared folder that numbers the starts (not with Ray, whose head does it).")
]
Trust = Annotated[
    bool, typer.Option("--trust-cluster", help="Use a Ray cluster without authentication; its network is closed.")
]
Resource = Annotated[str, typer.Option("--resource", help="Custom resource of the nodes that take shards.")]
Again = Annotated[int, typer.Option("--max-starts-again", min=-1, help="Of one shard, by Ray; -1: without end.")]
Executor = Annotated[str, typer.Option("--executor", metavar="slurm|local", help="local: processes of this machine.")]
TimeLimit = Annotated[
    float,
    typer.Option(
        "--time-limit",
        parser=seconds(60),
        show_default="24h",
        metavar="TIME",
        help="Of a task, before it is queued again; whole minutes.",
    ),
]
AtOnce = Annotated[int, typer.Option("--at-once", min=0, help="Tasks of the array at a time; 0 for all.")]
Sbatch = Annotated[
    list[str] | None, typer.Option("--sbatch", metavar="KEY=VALUE", help="A further option of sbatch; repeatable.")
]
Detach = Annotated[bool, typer.Option("--detach", help="Submit and return.")]
To = Annotated[Path, typer.Option("--to", help="The index's file.")]
Partial = Annotated[bool, typer.Option("--partial", help="Also while rows are still to be done.")]
SubsetOf = Annotated[str, typer.Option("--subset", help="Of each shard: 1/5, 2% or 50GiB.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Of the draw of a subset.")]


@app.command(context_settings=PASSED_ON)
def run(
    context: typer.Context, shards: Shards, base: Base, ray: RayAddress = "", slurm: Slurm = False, name: Name = "fleet",
    out: SharedOut = None, adopt_from: AdoptFrom = None, store: Store = "", trust_cluster: Trust = False,
    resource: Resource = "hsjournal", max_starts_again: Again = 20, executor: Executor = "slurm",
    time_limit: TimeLimit = 86_400.0, at_once: AtOnce = 0, sbatch: Sbatch = None, detach: Detach = False,
    plain: Plain = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Run all shards on the nodes of a cluster; the same command goes on. Further options are those of `run`."""
    from hsjournal.cli import fleeting

    if bool(ray) == slurm:
        raise fleeting.either()
    words = fleeting.checked(context.args)
    home = "" if ray else fleeting.store_of(store, base, one_machine=executor == "local")
    order = fleeting.order(name, shards, base, words, out, adopt_from, home)
    if ray:
        cluster = fleeting.cluster(ray, resource, max_starts_again, trusted=trust_cluster)
        raise typer.Exit(fleeting.on_ray(order, cluster, plain=plain, quiet=quiet))
    array = fleeting.array(executor, time_limit, at_once, sbatch or [])
    raise typer.Exit(fleeting.on_slurm(order, array, detach=detach, plain=plain, quiet=quiet))


@app.command(context_settings=PASSED_ON)
def shard(
    context: typer.Context,
    which: Annotated[str, typer.Argument(metavar="I/N", help="Which of how many.")],
    base: Base,
    name: Name = "fleet",
    out: SharedOut = None,
    adopt_from: AdoptFrom = None,
    store: Store = "",
) -> None:
    """Start one shard here, numbered like every other start of it: for schedulers that we don't know, and by hand."""
    from hsjournal.cli import fleeting

    words = fleeting.checked(context.args)
    number, of = fleeting.shard(which)
    order = fleeting.order(name, of, base, words, out, adopt_from, fleeting.store_of(store, base))
    raise typer.Exit(fleeting.here(order, number))


@app.command()
def status(folders: Folders, as_json: AsJson = False) -> None:
    """Tell how all shards stand; changes nothing, and answers also while some disks are stuck."""
    from hsjournal.fleet.survey import survey
    from hsjournal.ui.fleet import survey_text

    found = survey(folders)
    print(json.dumps(found) if as_json else survey_text(found))


@app.command()
def verify(
    folders: Folders, subset: SubsetOf = "", seed: Seed = None, as_json: AsJson = False, quiet: Quiet = False
) -> None:
    """Read the outputs of every shard that counts back from their storage; exit code 3 for damage."""
    from hsjournal.fleet.members import Member
    from hsjournal.fleet.survey import check
    from hsjournal.ops.subset import Subset
    from hsjournal.ops.verify_report import Progress
    from hsjournal.ui.fleet import checked_text
    from hsjournal.ui.progress import ProgressLine

    with ProgressLine("verify", quiet=quiet or as_json) as line:

        def tell(member: Member, p: Progress) -> None:
            line.show(p.rows, p.total_rows, p.nbytes, p.total_bytes, f"shard {member.shard}, {p.damaged:,} damaged")

        done = check(folders, Subset.parse(subset), time.time_ns() if seed is None else seed, tell)
    found = done.to_json()
    print(json.dumps(found) if as_json else checked_text(found))
    raise typer.Exit(int(done.exit_code))


@app.command()
def merge(folders: Folders, to: To, partial: Partial = False, as_json: AsJson = False) -> None:
    """Write one index of all shards, each row once: the highest incarnation of a shard counts, doubt is refused."""
    from hsjournal.fleet.merge import merge as put_together
    from hsjournal.ui.fleet import merged_text

    done = put_together(folders, Path(os.path.abspath(to)), partial=partial)
    print(json.dumps(done.to_json()) if as_json else merged_text(done.to_json()))
    raise typer.Exit(int(done.exit_code))
