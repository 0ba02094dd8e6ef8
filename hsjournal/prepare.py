"""Make a new run ready: schema, server, prompts, forecast, manifest. A child of the supervisor, by exec.

``python -m hsjournal.prepare REQUEST`` with a :class:`Request` as JSON. Standard output carries JSON lines:
``{"step": …}`` and ``{"progress": …}`` while it works, then ``{"ready": …}`` or ``{"error": …, "exit_code": …}``.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import sqlite3
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hsjournal import __version__, faults
from hsjournal.config import DRAFT_CONFIG, KEY_VARIABLE, LAUNCH, MORE_OUT, MORE_SERVERS, Manifest, RunPaths
from hsjournal.drift import READING, refuse_used_output
from hsjournal.dump.room import Room
from hsjournal.errors import HsjournalError, NoRoomError
from hsjournal.events import Event
from hsjournal.journal.migrate import migrate
from hsjournal.journal.refusals import refusal
from hsjournal.journal.store import Journal
from hsjournal.lifeline import end_with_parent
from hsjournal.makeable import make_folder, room
from hsjournal.prompts.forecast import Forecast, forecast, refuse_too_little
from hsjournal.prompts.ingest import ingest, without_torch
from hsjournal.prompts.spec import MARGIN, IngestResult, IngestSpec, Reading
from hsjournal.server.client import ServerClient
from hsjournal.server.preflight import ServerFacts, ask_agreement, preflight
from hsjournal.server.preflight.baseline import Baseline
from hsjournal.server.preflight.several import agreed
from hsjournal.sink.formats import layout_named, refuse_wrong_norm


@dataclass(frozen=True, slots=True)
class Request:
    """What a new run is to be.

    Args:
        run_dir: made if missing.
        run_id: chosen by the caller; a preparation that was cut short has its own already, and keeps it.
        prompts: input files.
        model: folder with tokenizer and config.
        server_url: a server that answers already.
        handover_root: shared with it.
        out_dir: absolute; empty or missing.
        more_out: further output folders, likewise.
        format: name of the output layout.
        allow_little_room: go on though the forecast does not fit.
        attached_to: address of a server that is not ours, empty for one of our own.
        more_servers: address and hand-over root of each further server.
        launched_with: command line of a server of our own that is not the embedded engine; empty for any other.
        in_place: the output folder holds finished files already, which are to be adopted.
        already_there: bytes of finished files that need not be written again.
        reading: how the prompts are read.
        tokenize_processes: 0 for as many as there are processors.
        parent_fd: read end of the supervisor's pipe.
    """

    run_dir: str
    run_id: str
    prompts: tuple[str, ...]
    model: str
    server_url: str
    handover_root: str
    out_dir: str
    more_out: tuple[str, ...] = ()
    format: str = "specforge"
    handover_budget: int = 64 << 30
    allow_little_room: bool = False
    attached_to: str = ""
    more_servers: tuple[tuple[str, str], ...] = ()
    launched_with: str = ""
    in_place: bool = False
    already_there: int = 0
    reading: Reading = field(default_factory=Reading)
    tokenize_processes: int = 0
    parent_fd: int = -1

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """The inverse of :meth:`to_json`."""
        raw = json.loads(text)
        more = tuple((url, root) for url, root in raw.get("more_servers", ()))
        reading = Reading(**raw.get("reading", {}))
        listed = {"prompts": tuple(raw["prompts"]), "more_out": tuple(raw.get("more_out", ()))}
        return cls(**raw | listed | {"reading": reading, "more_servers": more})

    @property
    def endpoints(self) -> tuple[tuple[str, str], ...]:
        """Address and hand-over root of every server."""
        return ((self.server_url, self.handover_root), *self.more_servers)


def prepare(request: Request, say: Callable[[dict[str, Any]], None]) -> None:
    """Do it all; the manifest comes last, so a run directory without one was not made ready.

    Raises:
        HsjournalError: with the exit code; what was made so far is used by the next try.
    """
    paths = RunPaths.of(request.run_dir)
    layout_named(request.format)
    out_dirs = [Path(request.out_dir), *map(Path, request.more_out)]
    say({"step": "making the output folders and hand-over roots"})
    for folder in out_dirs[request.in_place :]:
        refuse_used_output(folder)
    for folder in out_dirs:
        make_folder("the output folder", folder, "--out")
    for _, root in request.endpoints:
        make_folder("the hand-over root", Path(root), "--handover-root", mode=0o700)
    say({"step": "migrating the journal"})
    migrate(paths.journal)
    with Journal(paths.journal) as journal:
        run_id = journal.name_run(request.run_id)
    request = replace(request, run_id=run_id)
    say({"step": f"asking the server at {', '.join(url for url, _ in request.endpoints)}"})
    facts = asyncio.run(_ask_all(request, say))
    refuse_wrong_norm(layout_named(request.format), facts.meta.final_norm)
    spec = IngestSpec(
        run_id=request.run_id,
        files=request.prompts,
        model_dir=request.model,
        max_tokens=facts.longest_prompt or facts.context_length or 1 << 20,
        vocab_size=facts.vocab_size or None,
        margin=0 if facts.longest_prompt else MARGIN,
        journal=str(paths.journal),
        reading=request.reading,
        processes=request.tokenize_processes,
    )
    say({"step": "reading the prompts"})
    with Journal(paths.journal) as journal:
        result = ingest(journal, spec, lambda progress: say({"progress": asdict(progress)}))
    _say_what_is_not_proven(paths, facts)
    sizes = _forecast(result, facts, out_dirs, request.already_there)
    say({"forecast": asdict(sizes)})
    _check_room(request, sizes, out_dirs)
    faults.point("prepare.finishing")
    manifest = _manifest(request, facts, result)
    fresh = paths.manifest.with_suffix(".tmp")
    with fresh.open("w") as file:
        file.write(manifest.to_toml())
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(paths.manifest)
    _sync(paths.run_dir)
    say({"ready": {"rows": result.rows, "usable": result.usable, "skipped": result.skipped, "tokens": result.tokens}})


def _say_what_is_not_proven(paths: RunPaths, facts: ServerFacts) -> None:
    """Once in the journal: whose rows a dump holds is not proven by every protocol."""
    words = facts.meta.versions.get("identity")
    if words is not None:
        with Journal(paths.journal) as journal:
            event = Event("identity_unproven", None, {"engine": facts.meta.engine, "why": words})
            journal.add_events([(f"prepare:identity:{facts.boot_id}", event)])


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


async def _ask_all(request: Request, say: Callable[[dict[str, Any]], None]) -> ServerFacts:
    """What all servers have in common. A new run needs them all: that they agree can't be seen later."""
    return agreed({url: await _ask(request, url, Path(root), say) for url, root in request.endpoints})


async def _ask(request: Request, url: str, root: Path, say: Callable[[dict[str, Any]], None]) -> ServerFacts:
    """The whole preflight; what the first server's probe prompt looked like is kept for the canaries."""
    async with ServerClient(url, api_key=os.environ.get(KEY_VARIABLE, "")) as client:
        facts = await preflight(client, root, request.run_id)
        available = Room(root, request.handover_budget).available()
        agreement = await ask_agreement(client, root, request.run_id, facts, available)
    if agreement is not None and url == request.server_url:
        Baseline.of(agreement, facts.boot_id).save(Path(request.run_dir))
    found = facts.to_json() | {"url": url, "agreement": agreement.to_json() if agreement else None}
    say({"preflight": found})
    return facts


def _forecast(result: IngestResult, facts: ServerFacts, out_dirs: Sequence[Path], already_there: int) -> Forecast:
    free = sum(dict(map(room, out_dirs)).values()) + already_there  # folders may share a disk
    meta = facts.meta
    return forecast(result, len(meta.capture_layers), meta.hidden_size, meta.dtype, free)


def _check_room(request: Request, sizes: Forecast, out_dirs: Sequence[Path]) -> None:
    if request.allow_little_room:
        return
    refuse_too_little(sizes.output_bytes, sizes.free_bytes, out_dirs)
    for _, root in request.endpoints:
        capacity = Room(Path(root), request.handover_budget).capacity()
        if sizes.largest_dump_bytes > capacity:
            raise NoRoomError(
                f"the longest sample needs {sizes.largest_dump_bytes:,} bytes in the hand-over root {root}, "
                f"which can hold {capacity:,}",
                remedy="Give it more (docker run --shm-size, --handover-budget), or name a folder on a disk with "
                "--handover-root; or go on anyway with --allow-little-room.",
            )


def _manifest(request: Request, facts: ServerFacts, result: IngestResult) -> Manifest:
    meta = facts.meta
    return Manifest(
        run_id=request.run_id,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
        model=request.model,
        model_sha256=model_digest(Path(request.model)),
        tokenizer_sha256=result.tokenizer_sha256,
        hidden_size=meta.hidden_size,
        num_layers=facts.num_layers,
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        capture_layers=meta.capture_layers,
        dtype=meta.dtype,
        final_norm=meta.final_norm,
        format=request.format,
        out_dir=request.out_dir,
        engine=meta.engine,
        chunk_size=facts.chunk_size,
        sources=result.sources,
        options={
            "server": request.attached_to,
            "handover_root": request.handover_root,
            # Our own engine is held to the model's digest; of a foreign server its word is all there is.
            "model_path": facts.model_path if request.attached_to or request.launched_with else "",
            **({MORE_OUT: json.dumps(request.more_out)} if request.more_out else {}),
            **({MORE_SERVERS: json.dumps(request.more_servers)} if request.more_servers else {}),
            **({LAUNCH: request.launched_with} if request.launched_with else {}),
            DRAFT_CONFIG: facts.draft_config,
            **{READING + name: value for name, value in request.reading.said().items()},
        },
    )


def model_digest(model: Path) -> str:
    """SHA-256 over the model's config.json; empty when it has none."""
    config = model / "config.json"
    return hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""


def main(arguments: list[str]) -> int:
    """See the module."""

    def say(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    request = Request.from_json(arguments[0])
    end_with_parent(request.parent_fd)
    without_torch()
    try:
        try:
            prepare(request, say)
        except sqlite3.Error as error:
            raise refusal(error, RunPaths.of(request.run_dir).journal) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise NoRoomError(
                f"{error.filename or request.run_dir}: {error.strerror}", remedy="Make room, then run it again."
            ) from error
    except HsjournalError as error:
        say({"error": error.message, "remedy": error.remedy, "exit_code": int(error.exit_code)})
        return int(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the parent gets it as the typed last line, the log the traceback
        sys.stderr.write(traceback.format_exc())
        say({"error": f"{type(error).__name__}: {error}", "remedy": None, "exit_code": 1})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
