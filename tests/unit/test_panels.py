"""--help: every command, and every option of the long commands, has its place, and no place is for something gone."""

from __future__ import annotations

from typing import Any

import typer

from hsjournal.cli.app import app
from hsjournal.cli.panels import COMMANDS, OPTIONS, arrange


def test_everything_has_a_panel_and_every_panel_something() -> None:
    group: Any = typer.main.get_command(app)
    arrange(group)
    named = [name for names in COMMANDS.values() for name in names]
    assert sorted(named) == sorted(group.commands)
    keys = [key for names in OPTIONS.values() for key in names]
    assert len(keys) == len(set(keys))
    seen = set()
    for command in ("run", "resume"):
        for parameter in group.commands[command].params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                key = parameter.opts[0].removeprefix("--")
                seen.add(key)
                assert parameter.rich_help_panel == next((p for p, names in OPTIONS.items() if key in names), None), key
    assert set(keys) - seen <= {"help"}
