"""What a new run needs, looked at before anything is started for it: the same for ``run`` and for ``run --dry-run``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from hsjournal.catalogue.needs import require
from hsjournal.catalogue.whole import PREFIX as WRITING
from hsjournal.cli.servers import Servers, for_new_run
from hsjournal.config import RunPaths
from hsjournal.drift import refuse_nested, refuse_used_output
from hsjournal.errors import NoRoomError, PromptsError, UsageError
from hsjournal.makeable import refuse_unlikely, room
from hsjournal.prompts.records import parse_record
from hsjournal.prompts.refusal import RowRefusedError
from hsjournal.prompts.sources import expand, open_sources, remedy_for
from hsjournal.prompts.spec import Reading
from hsjournal.sink.formats import layout_named
from hsjournal.watch.children import module
from hsjournal.watch.ground import ask_patiently

if TYPE_CHECKING:
    from hsjournal.cli.job import Options

DEFAULT_FORMAT = "specforge"
FIRST_LINES = 1000
"""If none of so many is even JSON, the rest of the file won't be worth the start of a server."""
_OURS = frozenset(
    {
        "logs", "rejects", "settings.toml", "canary.npz", "supervisor.lock", "worker.lock", "manifest.tmp", "out",
        "fleet.json", "fleet.lock",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Beginning:
    """A new run that nothing cheap speaks against.

    Args:
        prompts: files and folders.
        reading: how they are read.
        format: name of the output layout.
        out_dirs: output folders, the first one first; absolute.
        in_place: the first one holds finished files already, which are to be adopted.
        servers: that it works with.
    """

    prompts: tuple[str, ...]
    reading: Reading
    format: str
    out_dirs: tuple[Path, ...]
    in_place: bool
    servers: Servers


def begin(paths: RunPaths, options: Options, *, rehearse: bool) -> Beginning:
    """Look at everything that costs little; a rehearsal makes nothing for it, and asks no server.

    Raises:
        UsageError, PromptsError, NoRoomError, ServerError: naming the argument and the remedy.
    """
    if not options.prompts:
        raise UsageError("a new run needs prompts", remedy="Name a JSON Lines file with --prompts FILE.")
    prompts = expand(options.prompts)
    refuse_no_prompts(prompts)
    reading = Reading(**options.reading)
    reading.frozen()
    layout = layout_named(options.format or DEFAULT_FORMAT)
    require(layout.name)
    out_dir = (options.out or paths.default_out).absolute()
    out_dirs = (out_dir, *(folder.absolute() for folder in options.more_out))
    refuse_nested(out_dirs)
    in_place = options.adopting == out_dir
    for folder in out_dirs[in_place:]:
        refuse_used_output(folder)
    refuse_strangers(paths)
    servers = for_new_run(paths, replace(options.wish, reach=not rehearse), layout)
    places = [("the run directory", paths.run_dir, "RUN_DIR")]
    places += [("the output folder", folder, "--out") for folder in out_dirs]
    places += [("the hand-over root", Path(e.handover_root), "--handover-root") for e in servers.endpoints]
    for place in places:
        refuse_unlikely(*place)
    if not rehearse:
        names = json.dumps([[what, str(folder), flag] for what, folder, flag in places])
        ask_patiently(module("hsjournal.makeable", names), f"the storage of {paths.run_dir} or its output", _tell)
    if not options.allow_little_room and not free_room(out_dirs):
        raise NoRoomError(
            f"there is no room at all in {', '.join(map(str, out_dirs))}",
            remedy="Make room, name another folder with --out, or go on anyway with --allow-little-room.",
        )
    return Beginning(tuple(prompts), reading, layout.name, out_dirs, in_place, servers)


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def free_room(out_dirs: tuple[Path, ...]) -> int:
    """Bytes that are free for the output; folders may share a disk."""
    return sum(dict(map(room, out_dirs)).values())


def refuse_strangers(paths: RunPaths) -> None:
    """Refuse a run directory that is a file, or that holds things of somebody else's.

    Raises:
        UsageError: naming them.
    """
    try:
        if not paths.run_dir.exists():
            return
        if not paths.run_dir.is_dir():
            raise UsageError(f"the run directory {paths.run_dir} is a file", remedy="Name a folder.")
        names = [place.name for place in paths.run_dir.iterdir()]
    except OSError as error:
        raise UsageError(
            f"the run directory {paths.run_dir} can't be read: {error.strerror}", remedy="Name another."
        ) from None
    strangers = [n for n in names if n not in _OURS and not n.startswith(("journal.db", WRITING))]
    if strangers:
        raise UsageError(
            f"the run directory {paths.run_dir} holds other things ({', '.join(sorted(strangers)[:3])})",
            remedy="Name a new or empty folder.",
        )


def refuse_no_prompts(files: Sequence[str]) -> None:
    """Refuse prompts of which no line is any, or no first line even JSON: ingestion says so after a server was started.

    Raises:
        PromptsError: naming the first line and what is wrong with it.
    """
    sources = open_sources(files)
    lines, objects, first = 0, 0, ""
    for line, name in islice(((line, source.name) for source in sources for line in source), FIRST_LINES):
        lines += 1
        try:
            raw = line.parse()
            objects += 1
            parse_record(raw)
        except RowRefusedError as error:
            first = first or f"{name}:{line.number}: {error}"
        else:
            return
    is_all = lines < FIRST_LINES
    if lines and (is_all or not objects):
        raise PromptsError(
            f"none of the {'' if is_all else 'first '}{lines:,} lines can be used; the first is {first}",
            remedy=remedy_for(files[0]),
        )
