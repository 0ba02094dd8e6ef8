"""--help says of each option all that is written for it; every time and size is taken as people write it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hsjournal.cli.app import app
from hsjournal.cli.settings import Option, options_of


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that lead to it, groups too."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *path, name)


GROUP: Any = typer.main.get_command(app)
ALL = dict(commands(GROUP))


def plain(text: str) -> str:
    """Words only: no frames, no line ends."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_nothing_of_an_options_help_is_lost(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "2000", "TERMINAL_WIDTH": "2000"})
    assert shown.exit_code == 0, shown.output
    words = plain(shown.output)
    for parameter in ALL[path].params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        name = max([*parameter.opts, *parameter.secondary_opts], key=len) if parameter.opts else parameter.name
        assert parameter.help, f"{name} has no help"
        assert plain(parameter.help) in words, f"{name}: {parameter.help}"
        if isinstance(parameter.show_default, str):
            assert f"[default: ({parameter.show_default})]" in words, name


def options(metavar: str) -> list[Option]:
    return [option for option in options_of(GROUP) if option.parameter.metavar == metavar]


def test_every_time_and_size_is_taken_as_people_write_it() -> None:
    assert len(options("TIME")) > 15
    assert len(options("SIZE")) > 5
    for option in options("TIME"):
        assert option.parameter.process_value(option.context, "1h30m") == 5400, option
        assert option.parameter.process_value(option.context, "90") == 90, option
    for option in options("SIZE"):
        assert option.parameter.process_value(option.context, "3GiB") == 3 << 30, option


def test_what_is_a_time_or_a_size_says_so() -> None:
    """By its name or its words: a plain number there would be taken for something else."""
    for option in options_of(GROUP):
        name, words = option.key, option.parameter.help or ""
        if re.search(r"(timeout|interval|limit|pause)$", name) and name != "limit":
            assert option.parameter.metavar == "TIME", option
        assert not re.match(r"(Seconds|Minutes|Bytes) ", words) or option.parameter.metavar in ("TIME", "SIZE"), option
