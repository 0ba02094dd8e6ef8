"""flag > HSJOURNAL_* > hsjournal.toml > default, and every refusal names file, key and the nearest one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from hsjournal.cli.app import app
from hsjournal.cli.main import main
from hsjournal.cli.settings import OTHER_VARIABLES, PREFIX, bind, options_of, unknown_variables
from tests.helpers.cli import REPOSITORY


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["hsjournal", *words])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> dict[str, tuple[Any, str]]:
    code, out, err = command(monkeypatch, capsys, "config", "show", "--json", *words)
    assert code == 0, err
    return {s["key"]: (s["value"], s["origin"]) for s in json.loads(out)["settings"]}


def test_each_origin_goes_before_the_next(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(monkeypatch, capsys)["max-in-flight"] == (32, "default")
    (here / "hsjournal.toml").write_text(
        'max-in-flight = 7\npause-limit = "2h"\nprompts = ["a.jsonl"]\n[resume]\nmax-in-flight = 9\n'
    )
    assert shown(monkeypatch, capsys)["max-in-flight"] == (7, "hsjournal.toml")
    assert shown(monkeypatch, capsys)["pause-limit"] == (7200, "hsjournal.toml")
    assert shown(monkeypatch, capsys, "--command", "resume")["max-in-flight"] == (9, "hsjournal.toml")
    monkeypatch.setenv("HSJOURNAL_MAX_IN_FLIGHT", "11")
    assert shown(monkeypatch, capsys)["max-in-flight"] == (11, "HSJOURNAL_MAX_IN_FLIGHT")
    group = typer.main.get_command(app)
    defaults, _ = bind(group)
    asked = group.commands["run"].make_context(  # type: ignore[attr-defined]
        "run", ["RUN", "--max-in-flight", "13"], default_map=defaults["run"]
    )
    assert asked.params["max_in_flight"] == 13


def test_a_named_file_goes_before_the_folders(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "hsjournal.toml").write_text("max-in-flight = 7\n")
    (here / "other.toml").write_text("max-in-flight = 8\n")
    monkeypatch.setenv("HSJOURNAL_CONFIG", "other.toml")
    assert shown(monkeypatch, capsys)["max-in-flight"] == (8, "other.toml")
    monkeypatch.setenv("HSJOURNAL_CONFIG", "none.toml")
    code, _, err = command(monkeypatch, capsys, "config", "show")
    assert (code, "none.toml" in err) == (2, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-inflight = 7", r"key 'max-inflight'.*'max-in-flight'"),
        ("[resum]\nmax-in-flight = 7", r"table \[resum\].*'resume'"),
        ("[resume]\nprompts = ['a']", r"key 'prompts' in \[resume\]"),
        ("max-in-flight = 0", r"max-in-flight = 0"),
        ("max-in-flight = 'many'", r"max-in-flight = 'many'"),
        ("max-in-flight = [1, 2]", "takes one value"),
        ("plain = 'yes'", "true or false"),
        ("pause-limit = '5 parsecs'", "not a time"),
        ("repair = true", "key 'repair'"),
        ("max-in-flight = ", "can't be read"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(
    text: str, words: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "hsjournal.toml").write_text(text)
    code, _, err = command(monkeypatch, capsys, "config", "show")
    assert code == 2
    assert "hsjournal.toml" in err
    assert re.search(words, err), err


def test_a_wrong_value_of_a_variable_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HSJOURNAL_RETRY_PAUSE", "soon")
    code, _, err = command(monkeypatch, capsys, "resume", "RUN")
    assert code == 2
    assert "HSJOURNAL_RETRY_PAUSE" in err


def test_variables_that_nothing_reads_are_told() -> None:
    found = unknown_variables(
        typer.main.get_command(app),
        {"HSJOURNAL_SINK_TREADS": "2", "HSJOURNAL_SHM": "/x", "HSJOURNAL_SINK_THREADS": "2"},
    )
    assert found == ["HSJOURNAL_SINK_TREADS is no setting; did you mean HSJOURNAL_SINK_THREADS?"]


def test_what_a_notify_command_is_given_is_no_unknown_setting() -> None:
    """It may call hsjournal, whose words would then be about our own variables."""
    from hsjournal.watch.notify import variables

    readme = (REPOSITORY / "README.md").read_text()
    rows = re.search(r"^\| `version`, `event`.*?(?=\n\n)", readme, re.MULTILINE | re.DOTALL)
    assert rows
    fields = {name for line in rows[0].splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert {"host", "silent_s", "after_s", "exit_code"} <= fields
    payload = {name: {} if name in ("counts", "threads") else "x" for name in fields}
    assert unknown_variables(typer.main.get_command(app), variables(payload, "{}")) == []


def test_a_misspelt_variable_is_told_of_and_the_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HSJOURNAL_SINK_TREADS", "2")
    code, _, err = command(monkeypatch, capsys, "config", "show")
    assert (code, err) == (0, "hsjournal: HSJOURNAL_SINK_TREADS is no setting; did you mean HSJOURNAL_SINK_THREADS?\n")


def test_what_is_exported_for_a_server_is_not_asked_of_who_attaches_to_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "prompts.jsonl").write_text('{"input_ids": [1, 2], "loss_mask": [1, 1]}\n')
    attach = ("run", "RUN", "--prompts", "prompts.jsonl", "--server", "http://127.0.0.1:9")
    monkeypatch.setenv("HSJOURNAL_CAPTURE_PRENORM", "1")
    code, _, err = command(monkeypatch, capsys, *attach)
    assert (code, "can't be reached" in err) == (13, True), err
    monkeypatch.delenv("HSJOURNAL_CAPTURE_PRENORM")
    code, _, err = command(monkeypatch, capsys, *attach, "--capture-prenorm")
    assert (code, "--capture-prenorm" in err) == (2, True), err


def test_every_variable_of_the_sources_is_known() -> None:
    """A new one must be listed, or users would be told that it does nothing."""
    known = {option.variable for option in options_of(typer.main.get_command(app))}
    known |= {PREFIX + name for name in OTHER_VARIABLES}
    used = {
        match
        for path in (REPOSITORY / "hsjournal").rglob("*.py")
        for match in re.findall(r"[\"'](HSJOURNAL_[A-Z_]*[A-Z])[\"']", path.read_text())
    }
    assert used - known == set()


def test_the_frozen_settings_of_a_run_are_shown(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hsjournal.states import State
    from tests.helpers.runs import make_run

    run = make_run(here, [State.PENDING])
    assert shown(monkeypatch, capsys, str(run.paths.run_dir))["hidden_size"] == (64, "manifest.toml, frozen")
