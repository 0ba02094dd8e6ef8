"""``hsjournal adopt``: from its words to an adoption, and what came of it on the screen."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hsjournal.cli import job
from hsjournal.cli.servers import layer_numbers
from hsjournal.config import RunPaths, Settings
from hsjournal.errors import ExitCode, NoJournalError
from hsjournal.ops.adopt import Adoption, adopt
from hsjournal.ui.operate import adopt_text
from hsjournal.ui.plain import PlainScreen
from hsjournal.ui.progress import ProgressLine
from hsjournal.ui.screens import screen_for
from hsjournal.watch.desk import StoppedError


@dataclass(frozen=True, slots=True)
class Asked:
    """What was said on the command line."""

    run_dir: Path
    outputs: Path
    prompts: list[Path] | None
    server: str
    model: str
    out: Path | None
    format: str
    layers: str
    dtype: str
    handover_root: Path | None
    port: int
    layers_checked: str
    compare: int
    link: bool
    allow_little_room: bool
    reading: dict[str, Any]


def take_over(asked: Asked, *, as_json: bool, quiet: bool) -> int:
    """Do it and say what came of it; the exit code."""
    paths, outputs = RunPaths.of(asked.run_dir), Path(os.path.abspath(asked.outputs))
    options = _options(asked, outputs)
    if paths.manifest.exists():
        job.check(paths, options)
    elif not asked.prompts:
        raise NoJournalError(
            f"{paths.run_dir} holds no run", remedy="Name prompts and a model or server too, and it is made first."
        )
    layers = tuple(layer_numbers(asked.layers_checked)) if asked.layers_checked else None
    adoption = Adoption(outputs, layers, asked.compare, asked.link)
    silent = quiet or as_json
    screen = PlainScreen(quiet=silent)
    try:
        with ProgressLine("adopt", quiet=silent) as line:
            report = adopt(
                paths,
                adoption,
                lambda: job.make(asked.run_dir, options),
                show=screen.show,
                tell=line.count,
            )
    except StoppedError as stop:
        return int(stop.code)
    found = report.to_json()
    print(json.dumps(found) if as_json else adopt_text(found, str(asked.run_dir)))
    return int(report.exit_code)


def take_finished(paths: RunPaths, options: job.Options, *, plain: bool, quiet: bool) -> ExitCode | None:
    """Take over what lies in the folders that ``options`` names, before the run goes on; the exit code if it was stopped.

    Raises:
        HsjournalError: as :func:`hsjournal.ops.adopt.adopt`.
    """
    for folder in options.adopt_from:
        outputs = Path(os.path.abspath(folder))
        if not any(names for _, _, names in os.walk(outputs)):
            continue  # nothing there is no reason to start a server for
        make = partial(job.make, paths.run_dir, replace(options, adopting=outputs))
        screen = screen_for(plain=plain, quiet=quiet, logs=paths.logs)
        try:
            report = adopt(paths, Adoption(outputs, link=True), make, show=screen.show)
        except StoppedError as stop:
            return stop.code
        finally:
            screen.close()
        if not quiet:
            print(adopt_text(report.to_json(), str(paths.run_dir)))
    return None


def _options(asked: Asked, outputs: Path) -> job.Options:
    return job.Options(
        prompts=asked.prompts,
        servers=(asked.server,) if asked.server else (),
        model=asked.model,
        out=Path(os.path.abspath(asked.out)) if asked.out else None,
        format=asked.format,
        layers=asked.layers,
        dtype=asked.dtype,
        handover_roots=(asked.handover_root,) if asked.handover_root else (),
        port=asked.port,
        allow_little_room=asked.allow_little_room,
        adopting=outputs,
        reading=asked.reading,
        already_there=_size(outputs) if asked.link or asked.out == asked.outputs else 0,
        settings={"handover_budget": Settings("", "").handover_budget},
    )


def _size(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum((Path(place) / name).lstat().st_size for place, _, names in os.walk(folder) for name in names)
