"""A resume goes on with what the last start was told: flag > variable > file > last start > default, and no secret is written."""

from __future__ import annotations

import json
import os
import signal
import time
import tomllib
from pathlib import Path

import pytest

from hsjournal.cli.kept import KEPT, NEVER_WRITTEN
from hsjournal.config import RunPaths
from tests.helpers.cli import Result, hsjournal, started
from tests.helpers.tiny_models import make_tiny_model

ROWS = 40
SLOW = "sink.opened=delay:0.3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


def settings(*words: str | Path, **environment: str) -> dict[str, tuple[object, str]]:
    shown = hsjournal("config", "show", "--json", *words, timeout=120, **environment)
    assert shown.code == 0, shown
    return {s["key"]: (s["value"], s["origin"]) for s in shown.json()["settings"]}


def interrupted(*words: str | Path, run_dir: Path, log: Path, **environment: str) -> str:
    """Start a run, and interrupt it when it has done some rows more; what it printed."""
    before = _done(run_dir)
    run = started(*words, log=log, HSJOURNAL_FAULTS=SLOW, **environment)
    deadline = time.monotonic() + 120
    while _done(run_dir) <= before:
        assert run.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    return log.read_text()


def _done(run_dir: Path) -> int:
    """Rows that are verified, or whose read-back was put off."""
    status = hsjournal("status", run_dir, "--json")
    if status.code:
        return 0
    found = status.json()
    return int(found["counts"].get("verified", {}).get("rows", 0)) + int(found["deferred"])


def test_a_resume_takes_up_what_the_last_start_was_told(model: Path, tmp_path: Path) -> None:
    prompts, run_dir, key = tmp_path / "prompts.jsonl", tmp_path / "run", tmp_path / "key"
    row = {"input_ids": list(range(3, 30)), "loss_mask": [1] * 27}
    prompts.write_text("".join(json.dumps({"id": f"r{n}"} | row) + "\n" for n in range(ROWS)))
    key.write_text("open-sesame")
    key.chmod(0o600)
    told = ("--max-in-flight", "3", "--verify", "sample:50%", "--pause-limit", "90min", "--api-key-file", key)
    secret = f"echo hush-hush >> {tmp_path}/told"
    first = ("run", run_dir, "--prompts", prompts, "--model", model, *told, "--notify-command", secret)
    interrupted(*first, run_dir=run_dir, log=tmp_path / "first", HSJOURNAL_MAX_OUT="5GB")
    kept = RunPaths.of(run_dir).settings
    assert tomllib.loads(kept.read_text()) == {
        "max-in-flight": 3, "verify": "sample:50%", "pause-limit": 5400.0, "api-key-file": str(key), "max-out": 5_000_000_000,
        "not-kept": ["notify-command"],
    }  # fmt: skip
    assert "sesame" not in kept.read_text()
    assert "hush" not in kept.read_text()

    origin = "settings.toml, from the last start"
    shown = settings(run_dir, "--command", "resume", HSJOURNAL_MAX_OUT="6GB")
    assert shown["max-in-flight"] == (3, origin)
    assert shown["pause-limit"] == (5400.0, origin)
    assert shown["max-out"] == (6_000_000_000, "HSJOURNAL_MAX_OUT")
    assert shown["stall-timeout"] == (300.0, "default")
    assert settings("--command", "resume")["max-in-flight"] == (32, "default")

    second = interrupted("resume", run_dir, "--max-in-flight", "2", run_dir=run_dir, log=tmp_path / "second")
    (line,) = [line for line in second.splitlines() if "kept from the last start" in line]
    assert "verify sample:50%" in line
    assert "max-in-flight" not in line
    assert "--notify-command, which is never written down" in second
    assert "HSJOURNAL_NOTIFY_COMMAND" in second
    again = tomllib.loads(kept.read_text())
    assert (again["max-in-flight"], again["verify"], "not-kept" in again) == (2, "sample:50%", False)

    last: Result = hsjournal("resume", run_dir, "--quiet")
    assert (last.code, last.err) == (0, "")
    counts = hsjournal("status", run_dir, "--json").json()
    assert 0 < counts["deferred"] < ROWS  # half of them were read back, as the first start had it


def test_what_can_not_be_kept_is_told(model: Path, tmp_path: Path) -> None:
    prompts, run_dir = tmp_path / "prompts.jsonl", tmp_path / "run"
    prompts.write_text(json.dumps({"input_ids": [3, 4, 5], "loss_mask": [1, 1, 1]}) + "\n")
    (run_dir / "settings.toml" / "in-the-way").mkdir(parents=True)
    done = hsjournal("run", run_dir, "--prompts", prompts, "--model", model, "--plain")
    assert done.code == 0, done
    (line,) = hsjournal("events", run_dir, "--kind", "kept_died").out.splitlines()
    assert "settings.toml can't be written: Is a directory" in json.loads(line)["detail"]["why"]


def test_a_damaged_file_is_named(model: Path, tmp_path: Path) -> None:
    from hsjournal.states import State
    from tests.helpers.runs import make_run

    run = make_run(tmp_path, [State.PENDING])
    for text, words in (
        ("max-in-flight = ", "can't be read"), ("max-in-flight = 'x'", "max-in-flight = 'x'"), ("model = 'm'", "unknown key 'model'"),
    ):  # fmt: skip
        run.paths.settings.write_text(text)
        refused = hsjournal("resume", run.paths.run_dir)
        assert refused.code == 2
        assert str(run.paths.settings) in refused.err
        assert words in refused.err
        assert len(refused.err.strip().splitlines()) == 1


def test_a_secret_is_in_no_setting_that_is_kept() -> None:
    assert not set(KEPT) & {*NEVER_WRITTEN, "api_key"}
    assert os.environ.get("HSJOURNAL_API_KEY") is None
