"""``hsjournal config show``: every setting of a command, its value and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hsjournal.cli.options import AsJson

app = typer.Typer(no_args_is_help=True, help="Settings and where they come from.")

Command = Annotated[str, typer.Option("--command", help="Whose settings, as run, resume, doctor.")]
MaybeRun = Annotated[
    Path | None,
    typer.Argument(metavar="[RUN_DIR]", help="A run: with its frozen settings, and what its last start was told."),
]


@app.command()
def show(context: typer.Context, run_dir: MaybeRun = None, command: Command = "run", as_json: AsJson = False) -> None:
    """Print every setting with its value and origin: flag > HSJOURNAL_* > hsjournal.toml > the last start's > default."""
    from hsjournal.cli.kept import ORIGIN, of_last_start
    from hsjournal.cli.settings import FILE, options_of, settings_file
    from hsjournal.config import RunPaths
    from hsjournal.errors import UsageError

    root: Any = context.find_root()
    options = [option for option in options_of(root.command) if option.command == command]
    if not options:
        known = sorted({option.command for option in options_of(root.command)})
        raise UsageError(f"no command with settings: {command!r}", remedy=f"One of: {', '.join(known)}.")
    target, defaults = root.command, root.default_map or {}
    for word in command.split(" "):
        target, defaults = target.commands[word], defaults.get(word, {})
    asked = target.make_context(command, [], resilient_parsing=True, default_map=defaults)
    origins = {"ENVIRONMENT": "environment", "DEFAULT_MAP": str(settings_file() or FILE), "DEFAULT": "default"}
    kept: dict[str, Any] = {}
    if run_dir is not None and command in ("run", "resume"):
        kept, _ = of_last_start(asked, RunPaths.of(run_dir))
    found = []
    for option in options:
        source = asked.get_parameter_source(option.parameter.name)
        origin = origins[source.name if source is not None else "DEFAULT"]
        if origin == "environment":
            origin = option.variable
        value = asked.params.get(option.parameter.name)
        if origin == "default" and option.parameter.name in kept:
            value, origin = kept[option.parameter.name], ORIGIN
        found.append({"key": option.key, "value": value, "origin": origin})
    if run_dir is not None:
        found += _frozen(run_dir)
    if as_json:
        print(json.dumps({"version": 1, "settings": found}, default=str))
        return
    width = max(len(item["key"]) for item in found)
    for item in found:
        value = item["value"]
        words = "-" if value is None or value in ("", ()) else str(value)
        print(f"{item['key']:<{width}}  {words}  ({item['origin']})")


def _frozen(run_dir: Path) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from hsjournal.config import Manifest, RunPaths

    manifest = asdict(Manifest.load(RunPaths.of(run_dir).manifest))
    manifest["sources"] = [source["path"] for source in manifest["sources"]]
    return [{"key": key, "value": value, "origin": "manifest.toml, frozen"} for key, value in manifest.items()]
