"""From the command line's words to a job for the supervisor; every bad argument is refused here or by who knows better."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hsjournal.cli.beginning import begin
from hsjournal.cli.servers import Wish, for_old_run, layer_numbers
from hsjournal.config import Manifest, RunPaths, Settings
from hsjournal.drift import Asked, refuse_drift
from hsjournal.errors import ExitCode, NoJournalError, end_code
from hsjournal.journal.locks import is_held
from hsjournal.makeable import make_folder
from hsjournal.server.recipe import SGLANG_START_TIMEOUT
from hsjournal.states import INCOMPLETE, State
from hsjournal.watch.children import StuckError, module, peek_at
from hsjournal.watch.notify import Addressees
from hsjournal.watch.supervisor import Job, Supervisor, tidy


@dataclass(frozen=True, slots=True)
class Options:
    """What was said on the command line; empty where nothing was.

    ``adopting`` is the folder whose files a new run is to take over, ``already_there`` how many of their bytes need not
    be written again. ``adopt_from`` are folders whose files are taken over before a run goes on. ``keep`` is what the next
    start takes up (:mod:`hsjournal.cli.kept`).
    """

    prompts: list[Path] | None = None
    servers: tuple[str, ...] = ()
    launch: str = ""
    start_timeout: float = SGLANG_START_TIMEOUT
    model: str = ""
    out: Path | None = None
    more_out: tuple[Path, ...] = ()
    format: str = ""
    layers: str = ""
    dtype: str = ""
    capture_prenorm: bool = False
    handover_roots: tuple[Path, ...] = ()
    port: int = 0
    protocol: str = "v2"
    allow_little_room: bool = False
    must_exist: bool = False
    adopting: Path | None = None
    already_there: int = 0
    adopt_from: tuple[Path, ...] = ()
    reading: dict[str, Any] = field(default_factory=dict)
    tokenize_processes: int = 0
    notify: Addressees = field(default_factory=Addressees)
    metrics_port: int = -1
    metrics_file: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    keep: dict[str, Any] | None = None

    @property
    def wish(self) -> Wish:
        """What it says of servers."""
        return Wish(
            servers=self.servers,
            launch=self.launch,
            start_timeout=self.start_timeout,
            handover_roots=self.handover_roots,
            model=self.model,
            layers=self.layers,
            dtype=self.dtype,
            prenorm=self.capture_prenorm,
            port=self.port,
            protocol=self.protocol,
        )


def make(run_dir: Path, options: Options) -> Job:
    """A job for a new run, or for the run that is there.

    Raises:
        UsageError, PromptsError, NoJournalError, SchemaError, ServerError: naming the argument and the remedy.
    """
    paths = RunPaths.of(run_dir)
    if paths.manifest.exists():
        return _existing(paths, options)
    may_be_made(paths, options)
    return _new(paths, options)


def may_be_made(paths: RunPaths, options: Options) -> None:
    """Refuse to make a run where one must exist already.

    Raises:
        NoJournalError: when one must.
    """
    if options.must_exist:
        raise NoJournalError(
            f"{paths.run_dir} holds no run that could be resumed",
            remedy="Start one with `hsjournal run RUN_DIR --prompts FILE`.",
        )


def carry_out(run_dir: Path, options: Options, *, plain: bool, quiet: bool) -> int:
    """Make a new run, or go on with one; the exit code. A run that is complete needs no server to find that out."""
    paths = RunPaths.of(run_dir)
    code = _end_of(paths)
    if code is None and options.adopt_from:
        from hsjournal.cli.adopting import take_finished

        if (stopped := take_finished(paths, options, plain=plain, quiet=quiet)) is not None:
            return int(stopped)
        code = _end_of(paths)
    if code is None:
        job = replace(make(run_dir, options), notify=options.notify, beside=_beside(paths, options))
        return supervise(job, plain=plain, quiet=quiet)
    check(paths, options)
    from hsjournal.ops.reconcile import reconcile

    reconcile(paths, dry_run=False)
    tidy(paths)
    if not quiet:
        _conclude(paths, code)
    return int(code)


def _beside(paths: RunPaths, options: Options) -> tuple[tuple[str, ...], ...]:
    """Who keeps the settings, and the metrics' process, where they are asked for."""
    beside = []
    if options.keep is not None:
        beside.append(tuple(module("hsjournal.cli.kept", str(paths.run_dir), json.dumps(options.keep))))
    if options.metrics_port < 0 and options.metrics_file is None:
        return tuple(beside)
    command = module("hsjournal.ops.metrics", str(paths.run_dir), "--port", str(options.metrics_port))
    if options.metrics_file is not None:
        command += ["--textfile", str(options.metrics_file.absolute())]
    return (*beside, tuple(command))


def _end_of(paths: RunPaths) -> ExitCode | None:
    """The exit code of a run whose every row has ended, be it that its read-back was put off; None for any other."""
    if not paths.manifest.exists() or is_held(paths.supervisor_lock):
        return None
    try:
        seen = peek_at(paths.journal)
    except StuckError:
        return None  # the supervisor waits for the storage, and says so
    counts, later = {state: c["rows"] for state, c in seen["counts"].items()}, seen["deferred"]
    if not sum(counts.values()) or sum(counts[state] for state in INCOMPLETE) > later:
        return None
    return end_code(counts[State.VERIFIED] + later, counts[State.FAILED])


def supervise(job: Job, *, plain: bool, quiet: bool) -> int:
    """Run the job with a screen that suits where its output goes; the exit code."""
    from hsjournal.ui.screens import screen_for

    screen = screen_for(plain=plain, quiet=quiet, logs=job.paths.logs)
    try:
        code = Supervisor(job, screen.show).run()
    finally:
        screen.close()
    if not quiet:
        _conclude(job.paths, code)
    return int(code)


def _conclude(paths: RunPaths, code: ExitCode) -> None:
    from hsjournal.ui.status import status_text
    from hsjournal.watch.status import status

    print(status_text(status(paths)))
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        print(f"stopped; nothing is lost. Go on with: hsjournal resume {paths.run_dir}")


def _new(paths: RunPaths, options: Options) -> Job:
    found = begin(paths, options, rehearse=False)
    make_folder("the run directory", paths.run_dir, "RUN_DIR")
    out_dir, *more_out = found.out_dirs
    servers = found.servers
    request = {
        "run_dir": str(paths.run_dir),
        "run_id": uuid.uuid4().hex[:8],
        "prompts": [os.path.abspath(name) for name in found.prompts],
        "reading": asdict(found.reading),
        "tokenize_processes": options.tokenize_processes,
        "out_dir": str(out_dir),
        "more_out": [str(folder) for folder in more_out],
        "format": found.format,
        "allow_little_room": options.allow_little_room,
        "handover_budget": options.settings["handover_budget"],
        "in_place": found.in_place,
        "already_there": options.already_there,
    }
    return Job(paths, Settings(**servers.settings, **options.settings), out_dir, servers.own, request | servers.request)


def check(paths: RunPaths, options: Options) -> Manifest:
    """What an existing run was made for.

    Raises:
        UsageError: when something else is asked of it now.
        SchemaError: when its manifest can't be read.
    """
    manifest = Manifest.load(paths.manifest)
    layers = tuple(layer_numbers(options.layers)) if options.layers else None
    asked = Asked(
        prompts=options.prompts,
        model=options.model or None,
        layers=layers,
        dtype=options.dtype or None,
        final_norm="pre" if options.capture_prenorm else None,
        format=options.format or None,
        out_dirs=[folder.absolute() for folder in (options.out, *options.more_out)] if options.out else None,
        reading=options.reading,
    )
    refuse_drift(manifest, asked, paths.run_dir)
    return manifest


def _existing(paths: RunPaths, options: Options) -> Job:
    manifest = check(paths, options)
    servers = for_old_run(paths, options.wish, manifest)
    return Job(paths, Settings(**servers.settings, **options.settings), Path(manifest.out_dir), servers.own)
