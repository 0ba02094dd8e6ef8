"""Every command of ``hsjournal``, each importing what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hsjournal import __version__
from hsjournal.cli import configuring, examine, fleet, operate, prompting, trainers
from hsjournal.cli.options import (
    AdoptFrom,
    ApiKeyFile,
    AsJson,
    Budget,
    CanaryEvery,
    ConnectTimeout,
    DryRun,
    Dtype,
    Format,
    Handover,
    Handovers,
    InFlight,
    Launch,
    Layers,
    LittleRoom,
    MaxOut,
    MetricsFile,
    MetricsPort,
    Model,
    NotifyCommand,
    NotifyUrl,
    Outs,
    ParentFd,
    PauseLimit,
    Plain,
    PollInterval,
    Port,
    Prenorm,
    Prompts,
    Protocol,
    Quiet,
    ReadTimeout,
    Restarts,
    RetryPause,
    RunDir,
    SampleTimeout,
    Servers,
    SinkThreads,
    StallTimeout,
    StartTimeout,
    Strikes,
    StuckLimit,
    Verbose,
    Verify,
    Watch,
)
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
    said,
)
from hsjournal.lifeline import end_with_parent

if TYPE_CHECKING:
    from hsjournal.cli.job import Options

START_TIMEOUT = 900.0
"""As :data:`hsjournal.server.recipe.SGLANG_START_TIMEOUT`, which is slow to import."""

app = typer.Typer(
    name="hsjournal",
    help="Resumable extraction of hidden states: every sample is a row in a journal, and nothing is lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(operate.app)
app.add_typer(examine.app)
app.add_typer(trainers.app)
app.add_typer(configuring.app, name="config")
app.add_typer(prompting.app, name="prompts")
app.add_typer(fleet.app, name="fleet")


@app.command()
def run(
    context: typer.Context, run_dir: RunDir, prompts: Prompts = None, server: Servers = None, launch: Launch = "",
    start_timeout: StartTimeout = START_TIMEOUT, api_key_file: ApiKeyFile = None, model: Model = "", out: Outs = None, format_: Format = "",
    layers: Layers = "", dtype: Dtype = "", capture_prenorm: Prenorm = False, handover_root: Handovers = None,
    protocol: Protocol = "v2",
    handover_budget: Budget = 64 << 30, max_in_flight: InFlight = 32, port: Port = 0, connect_timeout: ConnectTimeout = 10.0, read_timeout: ReadTimeout = 600.0,
    sample_timeout: SampleTimeout = 900.0, pause_limit: PauseLimit = 3600.0, retry_pause: RetryPause = 3.0,
    max_strikes: Strikes = 3, max_restarts: Restarts = 10, sink_threads: SinkThreads = 2, max_out: MaxOut = 0, verify: Verify = "full",
    canary_every: CanaryEvery = 500,
    stall_timeout: StallTimeout = 300.0, poll_interval: PollInterval = 2.0, stuck_limit: StuckLimit = 0.0,
    notify_command: NotifyCommand = "", notify_url: NotifyUrl = "", metrics_port: MetricsPort = -1, metrics_file: MetricsFile = None,
    max_tokens: MaxTokens = None, truncate: Truncate = False, last_turn_only: LastTurnOnly = False,
    min_loss_tokens: MinLossTokens = None, limit: Limit = None, shuffle_seed: ShuffleSeed = None,
    chat_template: ChatTemplate = None, trust_remote_code: TrustRemoteCode = False, shard: ShardOf = None,
    tokenize_processes: TokenizeProcesses = 0,
    allow_little_room: LittleRoom = False, adopt_from: AdoptFrom = None, dry_run: DryRun = False, plain: Plain = False, quiet: Quiet = False, verbose: Verbose = False,
    parent_fd: ParentFd = -1,
) -> None:  # fmt: skip
    """Extract the hidden states of all prompts; on an existing run directory, go on where it stands."""
    from hsjournal.cli import job

    if parent_fd >= 0:
        end_with_parent(parent_fd)
    options = job.Options(
        prompts=prompts, servers=tuple(server or ()), launch=launch, model=model,
        out=out[0] if out else None, more_out=tuple(out or ())[1:],
        format=format_, layers=layers, dtype=dtype,
        capture_prenorm=capture_prenorm and not (server and protocol != "v1" and _of_server(context)),
        handover_roots=tuple(handover_root or ()), port=port, protocol=protocol, allow_little_room=allow_little_room,
        reading=said(context), tokenize_processes=tokenize_processes, adopt_from=tuple(adopt_from or ()),
    )  # fmt: skip
    raise typer.Exit(_do(context, run_dir, options))


@app.command()
def resume(
    context: typer.Context, run_dir: RunDir, server: Servers = None, launch: Launch = "", start_timeout: StartTimeout = START_TIMEOUT,
    api_key_file: ApiKeyFile = None, handover_root: Handovers = None, handover_budget: Budget = 64 << 30,
    max_in_flight: InFlight = 32, port: Port = 0, connect_timeout: ConnectTimeout = 10.0, read_timeout: ReadTimeout = 600.0,
    sample_timeout: SampleTimeout = 900.0, pause_limit: PauseLimit = 3600.0, retry_pause: RetryPause = 3.0,
    max_strikes: Strikes = 3, max_restarts: Restarts = 10, sink_threads: SinkThreads = 2, max_out: MaxOut = 0, verify: Verify = "full",
    canary_every: CanaryEvery = 500,
    stall_timeout: StallTimeout = 300.0, poll_interval: PollInterval = 2.0, stuck_limit: StuckLimit = 0.0,
    notify_command: NotifyCommand = "", notify_url: NotifyUrl = "", metrics_port: MetricsPort = -1, metrics_file: MetricsFile = None,
    dry_run: DryRun = False, plain: Plain = False, quiet: Quiet = False, verbose: Verbose = False,
) -> None:  # fmt: skip
    """Go on with a run; refuses to create one."""
    from hsjournal.cli import job

    options = job.Options(
        servers=tuple(server or ()),
        launch=launch,
        handover_roots=tuple(handover_root or ()),
        port=port,
        must_exist=True,
    )
    raise typer.Exit(_do(context, run_dir, options))


@app.command()
def status(run_dir: RunDir, as_json: AsJson = False, watch: Watch = False, plain: Plain = False) -> None:
    """Tell how a run stands; changes nothing, and answers also while every disk is stuck."""
    from hsjournal.cli.quick import show_status

    if watch:
        from hsjournal.cli.watching import keep_watching

        keep_watching(run_dir, as_json=as_json, plain=plain)
        return
    show_status(run_dir, as_json=as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model's folder.")],
    handover_root: Annotated[
        str, typer.Option("--handover-root", help="Where dumps are handed over; share it with `run`.")
    ],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 for a free one; it is printed.")] = 30000,
    layers: Layers = "",
    dtype: Dtype = "auto",
    api_key_file: ApiKeyFile = None,
) -> None:
    """Serve a model with the embedded engine; further options are the engine's own (`python -m hsjournal.capture.embedded -h`)."""
    from hsjournal.cli.secret import take_key
    from hsjournal.cli.serve import serve as start

    take_key(api_key_file)
    arguments = [
        "--model",
        model,
        "--handover-root",
        handover_root,
        "--host",
        host,
        "--port",
        str(port),
        "--dtype",
        dtype,
    ]
    raise typer.Exit(start([*arguments, *(["--layers", layers] if layers else []), *context.args]))


def _of_server(context: typer.Context) -> bool:
    """Whether ``HSJOURNAL_CAPTURE_PRENORM`` says it, which the plugin in the server reads too: attached to one, it's not for us."""
    source = context.get_parameter_source("capture_prenorm")
    return source is not None and source.name == "ENVIRONMENT"


def _do(context: typer.Context, run_dir: Path, options: Options) -> int:
    """Start a run, or go on with it, with what may change between two starts: said now, else at the last start."""
    from dataclasses import replace

    from hsjournal.cli import job
    from hsjournal.cli.kept import recalled, to_keep
    from hsjournal.cli.rehearsal import rehearse
    from hsjournal.cli.secret import take_key
    from hsjournal.config import CHANGEABLE, RunPaths
    from hsjournal.watch.ground import await_answer
    from hsjournal.watch.notify import Addressees

    paths = RunPaths.of(run_dir)
    await_answer(paths.run_dir, lambda words: print(words, file=sys.stderr, flush=True))
    said = recalled(context, paths, quiet=context.params["quiet"])
    take_key(said["api_key_file"])
    options = replace(
        options,
        settings={name: said[name] for name in CHANGEABLE} | ({"log_level": "DEBUG"} if said["verbose"] else {}),
        start_timeout=said["start_timeout"],
        notify=Addressees(said["notify_command"], said["notify_url"]),
        metrics_port=said["metrics_port"],
        metrics_file=said["metrics_file"],
        keep=to_keep(context, said),
    )
    if said["dry_run"]:
        return rehearse(run_dir, options)
    return job.carry_out(run_dir, options, plain=said["plain"], quiet=said["quiet"])


@app.command("serve-args")
def serve_args(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder.")],
    layers: Layers = "",
    capture_prenorm: Prenorm = False,
    handover_root: Handover = None,
    as_json: AsJson = False,
) -> None:
    """Print the command line of a stock SGLang server that this model's states can be captured from."""
    import json

    from hsjournal.cli.serve_args import serve_args as work_out
    from hsjournal.cli.servers import layer_numbers

    root = str(handover_root.absolute()) if handover_root else "/dev/shm/hsjournal-dumps"  # noqa: S108 - a suggestion
    found = work_out(model, layer_numbers(layers) if layers else (), root, prenorm=capture_prenorm)
    print(json.dumps(found.to_json()) if as_json else found.text())


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(f"hsjournal {__version__}")
        raise typer.Exit
