"""The options of the commands: each is described once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from hsjournal.units import parse_bytes, parse_seconds

T = TypeVar("T", int, float)


def seconds(least: float) -> Callable[[str], float]:
    """A parser of times of at least ``least`` seconds, for an option."""

    def parse(text: str) -> float:
        value = _or_refused(parse_seconds, text)
        if value < least:
            raise typer.BadParameter(f"{text} is less than {least:g} s")
        return value

    return parse


def nbytes(text: str) -> int:
    """A parser of sizes, for an option."""
    return _or_refused(parse_bytes, text)


def read_back(text: str) -> str:
    """A policy of reading back, checked."""
    from hsjournal.sink.policy import ReadBackPolicy

    try:
        ReadBackPolicy.parse(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return str(text)


def _or_refused(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's folder: journal, manifest, logs.")]
Prompts = Annotated[
    list[Path] | None,
    typer.Option("--prompts", help="File (JSON Lines, .gz, .zst, Parquet), dataset folder or pattern; repeatable."),
]
Server = Annotated[str, typer.Option("--server", help="Attach to the server at http://HOST:PORT; it is never stopped.")]
Servers = Annotated[
    list[str] | None,
    typer.Option("--server", help="Attach to the server at http://HOST:PORT; it is never stopped. Repeatable."),
]
Launch = Annotated[
    str,
    typer.Option(
        "--launch", help='Start this server, and end it: "python -m sglang.launch_server --model-path DIR …".'
    ),
]
StartTimeout = Annotated[
    float,
    typer.Option(
        parser=seconds(1), show_default="15min", metavar="TIME", help="So long a launched server may take to be ready."
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file", help="File with the servers' API key, readable by you alone (or HSJOURNAL_API_KEY)."
    ),
]
Model = Annotated[
    str, typer.Option("--model", help="The model's folder (tokenizer, config; weights for the embedded engine).")
]
Out = Annotated[Path | None, typer.Option("--out", help="Output folder.", show_default="RUN_DIR/out")]
Outs = Annotated[
    list[Path] | None,
    typer.Option(
        "--out",
        help="Output folder; repeatable, one on each disk: the files are spread, and a full or stuck disk is left out.",
        show_default="RUN_DIR/out",
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="Output layout: specforge, specforge-dflash, specforge-dspark, speculators, modelopt, torchspec, angelslim, "
        "safetensors.",
        show_default="specforge",
    ),
]
Prenorm = Annotated[
    bool,
    typer.Option(
        "--capture-prenorm", help="Final state before the model's last norm (embedded engine; speculators implies it)."
    ),
]
MaxOut = Annotated[
    int,
    typer.Option(
        "--max-out",
        parser=nbytes,
        metavar="SIZE",
        help="Pause when the output holds so much, as 5TB, until `release` makes room. 0: no limit.",
    ),
]
Verify = Annotated[
    str,
    typer.Option(
        "--verify",
        metavar="full|sample:P|deferred",
        parser=read_back,
        help="Read files back at once: all, a share (sample:5%), or none; `hsjournal verify` does the rest later.",
    ),
]
Layers = Annotated[
    str, typer.Option("--layers", help="Outputs of these layers, 0-based, as 1,5,8.", show_default="1, L//2-1, L-4")
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16 (embedded engine).")]
Handovers = Annotated[
    list[Path] | None,
    typer.Option(
        "--handover-root",
        help="Shared with the server; once for all, or once for each server.",
        show_default="under /dev/shm",
    ),
]
Handover = Annotated[
    Path | None, typer.Option("--handover-root", help="Shared with the server.", show_default="under /dev/shm")
]
Budget = Annotated[
    int,
    typer.Option(
        "--handover-budget",
        parser=nbytes,
        show_default="64GiB",
        metavar="SIZE",
        help="In the hand-over root at most, as 64GiB.",
    ),
]
InFlight = Annotated[int, typer.Option("--max-in-flight", min=1, help="Requests at each server at once.")]
Protocol = Annotated[
    str,
    typer.Option(
        "--protocol", metavar="v1|v2",
        help="v1: --server is a patched server that writes req_N with .pt files (needs --layers).",
    ),
]  # fmt: skip
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Of the embedded engine; 0 for a free one.")]
ConnectTimeout = Annotated[
    float, typer.Option(parser=seconds(0.1), show_default="10s", metavar="TIME", help="Seconds to get a connection.")
]
ReadTimeout = Annotated[
    float,
    typer.Option(
        parser=seconds(1),
        show_default="10min",
        metavar="TIME",
        help="Seconds of silence after which a request is given up.",
    ),
]
SampleTimeout = Annotated[
    float,
    typer.Option(
        parser=seconds(1), show_default="15min", metavar="TIME", help="Seconds from sending a sample to its dump."
    ),
]
PauseLimit = Annotated[
    float,
    typer.Option(
        parser=seconds(0), show_default="1h", metavar="TIME", help="Seconds a full disk or a lost server is waited for."
    ),
]
RetryPause = Annotated[
    float,
    typer.Option(
        parser=seconds(0.05), show_default="3s", metavar="TIME", help="Seconds between two looks at what is paused for."
    ),
]
StallTimeout = Annotated[
    float,
    typer.Option(
        parser=seconds(0.5),
        show_default="5min",
        metavar="TIME",
        help="So long without progress is a stall; more for samples longer than usual.",
    ),
]
PollInterval = Annotated[
    float, typer.Option(parser=seconds(0.1), show_default="2s", metavar="TIME", help="Between two looks at the worker.")
]
StuckLimit = Annotated[
    float,
    typer.Option(
        parser=seconds(0),
        show_default="none",
        metavar="TIME",
        help="Give up (exit 4) when the storage has hung for so long; by default it is waited for.",
    ),
]
NotifyCommand = Annotated[
    str,
    typer.Option(
        "--notify-command",
        envvar="HSJOURNAL_NOTIFY_COMMAND",
        metavar="COMMAND",
        help="Run at a stall, a recovery and the end; the facts come as JSON on standard input.",
    ),
]
NotifyUrl = Annotated[
    str,
    typer.Option(
        "--notify-url",
        envvar="HSJOURNAL_NOTIFY_URL",
        metavar="URL",
        help="The same facts as a JSON POST to this address.",
    ),
]
Strikes = Annotated[int, typer.Option("--max-strikes", min=1, help="Strikes after which a sample is failed.")]
Restarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", min=0, help="Deaths of the worker in a row, without a sample done, until giving up."
    ),
]
CanaryEvery = Annotated[
    int,
    typer.Option(
        "--canary-every", min=0, help="Samples after which a known prompt is sent again and compared; 0: never."
    ),
]
SinkThreads = Annotated[int, typer.Option(min=1, max=32, help="Samples written at once.")]
LittleRoom = Annotated[bool, typer.Option("--allow-little-room", help="Start although the forecast does not fit.")]
AdoptFrom = Annotated[
    list[Path] | None,
    typer.Option(
        "--adopt-from",
        help="First take over the finished files in this folder, as `adopt --outputs --link`; repeatable.",
    ),
]
ParentFd = Annotated[int, typer.Option("--parent-fd", hidden=True, help="Pipe that ends with who started us.")]
Watch = Annotated[
    bool, typer.Option("--watch", help="Go on telling, as the run's own screen does; Ctrl-C ends only this.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan only; change nothing.")]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines also on a terminal.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Errors only.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Every step of every row into RUN_DIR/logs/worker.log.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
MetricsPort = Annotated[
    int, typer.Option("--metrics-port", min=-1, max=65535, help="Of the endpoint; 0 for a free one, -1 for none.")
]
MetricsHost = Annotated[
    str, typer.Option("--metrics-host", help="Address to listen on; others than loopback are open to all.")
]
MetricsFile = Annotated[Path | None, typer.Option("--metrics-file", help="Keep this file too, for node_exporter.")]
MetricsEvery = Annotated[
    float,
    typer.Option(
        "--metrics-every", parser=seconds(1), show_default="15s", metavar="TIME", help="Between two writings."
    ),
]
