"""status --json is what its description says, in the code and in the README."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from hsjournal.birth import own_create_time
from hsjournal.config import RunPaths
from hsjournal.errors import ServerError
from hsjournal.events import Event
from hsjournal.journal.store import Journal
from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.states import State
from hsjournal.ui.status import status_text
from hsjournal.watch.onlooker import Onlooker
from hsjournal.watch.presence import ENDED, STARTED, Ending
from hsjournal.watch.status import FIELDS, VERSION, status
from tests.helpers.cli import REPOSITORY
from tests.helpers.runs import MadeRun, make_run


def test_the_fields_are_those_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSJOURNAL_SHM", str(tmp_path))
    run = make_run(tmp_path, [State.VERIFIED, State.FAILED, State.PENDING])
    found = status(run.paths)
    assert list(found) == list(FIELDS)
    assert found["version"] == VERSION == 1


def test_the_readme_has_the_same_table() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", (REPOSITORY / "README.md").read_text(), re.MULTILINE))
    assert {key: table.get(key) for key in FIELDS} == FIELDS


def asked(run: MadeRun, record: dict[str, Any] | None) -> dict[str, Any]:
    """The status with this supervisor's record in shared memory; None for none."""
    mirror = Mirror(run.paths.mirror)
    mirror.create()
    if record is not None:
        mirror.write(SUPERVISOR, record)
    found = status(run.paths)
    assert list(found) == list(FIELDS)
    return found


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    monkeypatch.setenv("HSJOURNAL_SHM", str(tmp_path))
    run = make_run(tmp_path, [State.VERIFIED, State.PENDING])
    run.paths.mirror.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return run


def own(**more: Any) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "create_time": own_create_time(),
        "monotonic": time.monotonic(),
        "stage": "running",
    } | more


def test_while_prompts_are_read_every_field_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSJOURNAL_SHM", str(tmp_path))
    paths = RunPaths.of(tmp_path / "run")
    mirror = Mirror(paths.mirror)
    mirror.create()
    mirror.write(SUPERVISOR, own(stage="preparing", sentence="reading prompts"))
    found = status(paths)
    assert list(found) == list(FIELDS)
    assert (found["rows"], found["problem"], found["supervisor"]["stage"]) == (0, None, "preparing")
    assert "preparing: reading prompts" in status_text(found)


def test_a_supervisor_without_a_sign_of_life_is_no_living_one(made: MadeRun) -> None:
    found = asked(made, own())
    assert (found["supervisor"]["state"], found["verdict"]) == ("alive", None)
    assert found["supervisor"]["beat_age_s"] < 5
    found = asked(made, own(monotonic=time.monotonic() - 40, verdict={"verdict": "healthy"}))
    assert (found["supervisor"]["state"], found["verdict"]["verdict"]) == ("silent", "supervisor_stuck")
    assert found["supervisor"]["beat_age_s"] >= 40
    assert "PROBLEM" in status_text(found)
    assert "no sign of life for 40 s" in status_text(found)
    view = Onlooker(made.paths).view()
    assert view is not None
    assert (view.stage, (view.verdict or {})["verdict"]) == ("NOT WATCHED", "supervisor_stuck")


def test_a_run_that_ended_by_itself_says_so_with_and_without_its_mirror(made: MadeRun) -> None:
    error = ServerError("the server gives other states", remedy="`hsjournal retry RUN --doubted`")
    facts = Ending.by_error(error, "RUN").facts()
    view = asked(made, {"out_dir": "/out"} | facts)
    with Journal(made.paths.journal) as journal:
        journal.add_events([("k" * 32, Event(STARTED, None, {"pid": 1})), ("l" * 32, Event(ENDED, None, facts))])
    (made.paths.mirror / SUPERVISOR).unlink()
    for found in (view, asked(made, None)):
        assert (found["supervisor"]["state"], found["supervisor"]["exit_code"]) == ("ended", 13)
        assert found["verdict"]["verdict"] == "not_running"
        assert "with exit 13: the server gives other states" in found["verdict"]["sentence"]
        assert "retry RUN --doubted" in found["verdict"]["way_out"]
        assert "hsjournal resume RUN" in found["verdict"]["way_out"]
        text = status_text(found)
        assert "DEAD" not in text
        assert "with exit 13" in text


def test_a_start_without_an_end_is_a_death(made: MadeRun) -> None:
    assert asked(made, None)["verdict"]["verdict"] == "not_running", "nothing tells of any"
    with Journal(made.paths.journal) as journal:
        journal.add_events([("k" * 32, Event(STARTED, None, {"pid": 1}))])
    assert asked(made, None)["verdict"]["verdict"] == "supervisor_dead"
    assert asked(made, own(create_time=1.0))["supervisor"]["state"] == "dead"
