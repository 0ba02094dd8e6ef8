"""How a server of our own is started: the embedded engine, or a stock SGLang server by the user's own command line."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hsjournal.config import KEY_VARIABLE
from hsjournal.errors import UsageError
from hsjournal.server.launch import free_port

SGLANG_START_TIMEOUT = 900.0
"""Seconds: a first start on one GPU took 50 to 150, and over 150 on two; big models load for minutes."""
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SHELL = frozenset({"&&", "||", "|", ";", ">", ">>", "<", "&", "2>&1", "2>"})
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - where to ask, not to listen
_KEY_OPTIONS = ("--api-key", "--admin-api-key")


@dataclass(frozen=True, slots=True)
class EmbeddedOptions:
    """How to start the embedded engine.

    Args:
        model: folder.
        handover_root: shared with the client.
        layers: 0-based, comma-separated; empty for the default.
        dtype: ``auto``, ``float32`` or ``bfloat16``.
        port: 0 for a free one.
        extra: further arguments of ``hsjournal serve``.
    """

    model: str
    handover_root: str
    layers: str = ""
    dtype: str = "auto"
    port: int = 0
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that differs between the servers that we can start.

    Args:
        name: what to call it to people.
        argv: the command line.
        url: where it will listen.
        environment: added to ours.
        without: variables of ours that it does not get.
        ready: paths that answer 200, one after the other, when it is ready; the last one is its ``/server_info``.
        start_timeout: seconds until then.
        answer_timeout: seconds for one answer while it starts: SGLang's ``/health`` waits for a real token.
    """

    name: str
    argv: tuple[str, ...]
    url: str
    environment: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    ready: tuple[str, ...] = ("/server_info",)
    start_timeout: float = 600.0
    answer_timeout: float = 5.0


def embedded(options: EmbeddedOptions) -> Recipe:
    """The embedded engine, on a port of 127.0.0.1."""
    o = options
    port = o.port or free_port()
    argv = (
        sys.executable, "-m", "hsjournal.capture.embedded", "--model", o.model, "--host", "127.0.0.1", "--port", str(port),
        "--handover-root", o.handover_root, "--dtype", o.dtype, *(("--layers", o.layers) if o.layers else ()), *o.extra,
    )  # fmt: skip
    return Recipe("the embedded engine", argv, f"http://127.0.0.1:{port}")


def stock(
    command: str,
    handover_root: str,
    *,
    layers: Sequence[int] = (),
    prenorm: bool = False,
    start_timeout: float = SGLANG_START_TIMEOUT,
) -> Recipe:
    """A stock SGLang server by a command line as one would type it, variables before it included; no shell runs it.

    Args:
        command: ``VARIABLE=value … python -m sglang.launch_server --model-path DIR …``; ``--port`` and ``--host`` are found
            in it, or added.
        handover_root: where it is to put its dumps.
        layers: outputs to capture, 0-based; none for the plugin's default.
        prenorm: whether the final state is that before the model's last norm.
        start_timeout: seconds until it must answer.

    Raises:
        UsageError: when it can't be started so.
    """
    words = words_of(command)
    given: dict[str, str] = {}
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        given[match[1]] = match[2]
        words = words[1:]
    if not words:
        raise UsageError(
            "the server's command line is empty", remedy='Give it as --launch "python -m sglang.launch_server …".'
        )
    for option in _KEY_OPTIONS:
        if value_of(words, option) is not None:
            raise UsageError(
                f"{option} in the server's command line would stand in every list of processes, and in our journal",
                remedy="Put it into a file for SGLang's --config, and name it to us with --api-key-file.",
            )
    program = shutil.which(words[0], path=given.get("PATH"))
    if program is None:
        raise UsageError(f"there is no program {words[0]!r} to start the server with", remedy="Check --launch.")
    host, port = value_of(words, "--host"), value_of(words, "--port")
    if port is None:
        port = str(free_port())
        words = [*words, "--port", port]
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"--port {port} in the server's command line is none", remedy="Check --launch.")
    if host is None:
        host = "127.0.0.1"
        words = [*words, "--host", host]
    host = _ANY_ADDRESS.get(host, host)
    capture = {"HSJOURNAL_HANDOVER_ROOT": handover_root}
    if layers:
        capture["HSJOURNAL_CAPTURE_LAYERS"] = ",".join(map(str, layers))
    if prenorm:
        capture["HSJOURNAL_CAPTURE_PRENORM"] = "1"
    return Recipe(
        "SGLang",
        (program, *words[1:]),
        f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        given | capture,
        without=(KEY_VARIABLE,),
        ready=("/health", "/server_info"),
        start_timeout=start_timeout,
        answer_timeout=60.0,
    )


def words_of(command: str) -> list[str]:
    """The words of a command line, quotes heeded.

    Raises:
        UsageError: when a quote is left open, or it needs a shell.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(
            f"the server's command line can't be read: {error}", remedy="Check the quotes in --launch."
        ) from None
    shell = [word for word in words if word in _SHELL]
    if shell:
        raise UsageError(
            f"the server's command line holds {shell[0]!r}, and is not run through a shell",
            remedy="Give one command alone; its log goes to the run's logs.",
        )
    return words


def value_of(words: Sequence[str], option: str) -> str | None:
    """What a command line gives an option, as ``--port 1`` or ``--port=1``; the last one counts. None when it is not there."""
    found = None
    for index, word in enumerate(words):
        if word == option and index + 1 < len(words):
            found = words[index + 1]
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


def model_of(command: str) -> str:
    """The model that a server's command line names; empty when it names none, or no folder."""
    words = words_of(command)
    model = value_of(words, "--model-path") or value_of(words, "--model") or ""
    return model if (Path(model) / "config.json").is_file() else ""
