"""A run's settings outlive its start: ``RUN_DIR/settings.toml`` holds those of the last one, and a resume takes them up.

They stand below flag, environment and ``hsjournal.toml``, and above the defaults. Written by a child
(``python -m hsjournal.cli.kept RUN_DIR JSON``) beside the run, since the disk may hang; only who holds the run's lock starts it.
Who is told of stalls is never written down, since a command or an address may hold a secret: only that there was one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hsjournal.config import CHANGEABLE, RunPaths
from hsjournal.errors import UsageError

KEPT = (*CHANGEABLE, "start_timeout", "metrics_port", "metrics_file", "api_key_file")
"""Parameters whose values are kept; of the API key only where its file is."""
NEVER_WRITTEN = ("notify_command", "notify_url")
NOT_KEPT = "not-kept"
"""The file's key with the options of :data:`NEVER_WRITTEN` that the last start had."""
ORIGIN = "settings.toml, from the last start"
_HEADER = (
    "# What the last start of this run was told, but for the defaults; the next start takes it up. See README, Use.\n"
)


def recalled(context: Any, paths: RunPaths, *, quiet: bool) -> dict[str, Any]:
    """The parameters of ``run`` or ``resume``, with the last start's where nothing is said now; says which, in one line.

    Raises:
        UsageError: when the file is damaged, naming it.
    """
    values: dict[str, Any] = dict(context.params)
    if not paths.manifest.exists():
        return values
    found, missing = of_last_start(context, paths)
    silent = {name for name in values if context.get_parameter_source(name).name == "DEFAULT"}
    taken = {name: value for name, value in found.items() if name in silent}
    words = ", ".join(f"{_keys(context)[name]} {value}" for name, value in taken.items())
    if words and not quiet:
        print(f"hsjournal: kept from the last start: {words}", file=sys.stderr)
    for key in missing:
        if not values[key.replace("-", "_")] and not quiet:
            variable = "HSJOURNAL_" + key.replace("-", "_").upper()
            print(
                f"hsjournal: the last start had --{key}, which is never written down, and this one has none: "
                f"give it again, or set {variable}",
                file=sys.stderr,
            )
    return values | taken


def of_last_start(context: Any, paths: RunPaths) -> tuple[dict[str, Any], list[str]]:
    """What the last start was told, by parameter; and the options that it had and that are never written down.

    Raises:
        UsageError: when the file is damaged, naming it.
    """
    from hsjournal.cli.settings import Option, checked

    path = paths.settings
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}, []
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}", remedy="Correct it, or delete it to begin anew.") from None
    missing = [str(key) for key in raw.pop(NOT_KEPT, []) if str(key).replace("-", "_") in NEVER_WRITTEN]
    names = {key: name for name, key in _keys(context).items() if name in KEPT}
    found = {}
    for key, value in raw.items():
        if key not in names:
            raise UsageError(f"{path} has an unknown key {key!r}", remedy="Correct it, or delete it to begin anew.")
        parameter = next(p for p in context.command.params if p.name == names[key])
        option = Option(context.info_name or "", key, parameter, context)
        found[names[key]] = parameter.process_value(context, checked(path, option, value))
    return found, missing


def to_keep(context: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``values`` the next start takes up, by the file's keys: all that is not the default; paths are absolute."""
    keys = _keys(context)
    defaults = {p.name: p.process_value(context, p.default) for p in context.command.params if p.name in KEPT}
    kept: dict[str, Any] = {}
    for name in KEPT:
        value = values[name]
        if value != defaults[name] and value is not None:
            kept[keys[name]] = str(value.absolute()) if isinstance(value, Path) else value
    if missing := [keys[name] for name in NEVER_WRITTEN if values[name]]:
        kept[NOT_KEPT] = missing
    return kept


def _keys(context: Any) -> dict[str, str]:
    """The long name of each option, by its parameter."""
    long = {p.name: [text[2:] for text in p.opts if text.startswith("--")] for p in context.command.params}
    return {name: names[0] for name, names in long.items() if names}


def _main(arguments: list[str]) -> int:
    """Write the file; the supervisor tells of what can't be written, since the next start would miss it."""
    import tomli_w

    from hsjournal.catalogue.whole import replaced
    from hsjournal.lifeline import end_with_parent

    parser = argparse.ArgumentParser(prog="hsjournal-kept")
    parser.add_argument("run_dir")
    parser.add_argument("settings")
    parser.add_argument("--parent-fd", type=int, default=-1)
    options = parser.parse_args(arguments)
    end_with_parent(options.parent_fd)
    paths = RunPaths.of(options.run_dir)
    try:
        with replaced(paths.settings) as file:
            file.write((_HEADER + tomli_w.dumps(json.loads(options.settings))).encode())
    except OSError as error:
        print(f"{paths.settings} can't be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
