"""``python -m hsjournal.capture.embedded``: the engine as a process.

When it is ready it prints one JSON line with its ``url``. It ends on SIGTERM and SIGINT, and with its parent.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from hsjournal.capture.embedded.endpoints import HttpServer
from hsjournal.capture.embedded.layers import parse_layers
from hsjournal.capture.embedded.lifetime import Lifetime, Stopping
from hsjournal.capture.root import HandoverRoot
from hsjournal.dump.protocol import BOOT_ID_VARIABLE, ITEM_SIZE
from hsjournal.errors import HsjournalError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEY_VARIABLE = "HSJOURNAL_API_KEY"
"""With it in the environment, every request must carry it as a bearer token."""
RID_LOG_VARIABLE = "HSJOURNAL_RID_LOG"
"""Default of ``--rid-log``, for an engine that is started by somebody else's command."""

log = logging.getLogger("hsjournal.capture")


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m hsjournal.capture.embedded", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="the model's folder")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000, help="0 for any free one (default: %(default)s)")
    add("--handover-root", type=Path, required=True, metavar="DIR", help="where dumps are handed over")
    add("--group-mode", action="store_true", help="let the group of the root read and delete dumps")
    add("--layers", metavar="K,K,…", help="outputs of which layers, 0-based (default: 1, L//2-1 and L-4)")
    add("--dtype", choices=("auto", *ITEM_SIZE), default="auto")
    add("--capture-prenorm", action="store_true", help="the final state is that before the model's last norm")
    add("--device", default="auto", help="cpu, cuda, … (default: cuda if there is one)")
    add("--context-length", type=int, metavar="N", help="refuse prompts longer than this (default: the model's)")
    add("--max-batch-tokens", type=int, default=2048, metavar="N", help="of one forward pass (default: %(default)s)")
    add("--torch-threads", type=int, default=0, metavar="N", help="(default: torch's choice)")
    add("--writer-threads", type=int, default=2, metavar="N", help="dumps written at a time (default: %(default)s)")
    add("--room-wait", type=float, default=3.0, metavar="SECONDS", help="before a full root fails a dump")
    add("--boot-id", default=os.environ.get(BOOT_ID_VARIABLE), help="of this life of the server (default: a fresh one)")
    add("--parent-fd", type=int, metavar="FD", help="end when this pipe ends")
    add("--log-file", type=Path, metavar="FILE", help="(default: stderr)")
    add(
        "--rid-log",
        type=Path,
        default=os.environ.get(RID_LOG_VARIABLE),
        metavar="FILE",
        help="append the rid of every accepted request of ours",
    )
    options = parser.parse_args(arguments)
    if options.max_batch_tokens < 1 or options.writer_threads < 1 or options.torch_threads < 0:
        parser.error("--max-batch-tokens and --writer-threads start at 1, --torch-threads at 0")
    if not 0 <= options.port <= 65535:
        parser.error("--port is 0 to 65535")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the engine; the exit code."""
    options = parse_options(arguments)
    try:
        lifetime = Lifetime(options.parent_fd)
        _run(options, lifetime)
    except HsjournalError as error:
        sys.stderr.write(f"hsjournal: {error}\n")
        return error.exit_code
    except Stopping as stop:
        return stop.code
    return 1


def _run(options: argparse.Namespace, lifetime: Lifetime) -> None:
    """Cheap checks first: a wrong argument must not cost the loading of a model."""
    _start_log(options.log_file)
    layers = None if options.layers is None else parse_layers(options.layers)
    if not (options.model / "config.json").is_file():
        raise UsageError(
            f"There is no model in {options.model} (no config.json)",
            remedy="Name a folder with config.json and safetensors, as save_pretrained leaves it.",
        )
    accepted = _rid_log(options.rid_log)
    server = HttpServer(options.host, options.port, os.environ.get(KEY_VARIABLE, ""))
    HandoverRoot(options.handover_root, group_mode=options.group_mode).close()

    from hsjournal.capture.embedded.start import start

    engine, service = start(options, layers, options.boot_id or uuid.uuid4().hex, accepted)
    try:
        server.open(service)
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        sys.stdout.write(json.dumps({"url": server.url, "boot_id": service.server_info["hsjournal"]["boot_id"]}) + "\n")
        sys.stdout.flush()
        log.info("serving %s at %s", options.model, server.url)
        engine.run()
    finally:
        lifetime.end()
        engine.publisher.writer.close()


def _start_log(file: Path | None) -> None:
    form = "%(asctime)s %(levelname)s %(message)s"
    try:
        logging.basicConfig(filename=file, level=logging.WARNING, format=form)
    except OSError as error:
        raise UsageError(f"The log file {file} can't be written: {error.strerror}", remedy="Name another.") from None
    logging.getLogger("hsjournal").setLevel(logging.INFO)


def _rid_log(file: Path | None) -> Callable[[str], None]:
    if file is None:
        return lambda _rid: None
    try:
        fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(f"The rid log {file} can't be written: {error.strerror}", remedy="Name another.") from None

    def append(rid: str) -> None:
        os.write(fd, f"{rid}\n".encode())

    return append


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    logging.shutdown()
    # Threads may sit in a system call or in torch: the interpreter's own way out would wait for them.
    os._exit(code)
