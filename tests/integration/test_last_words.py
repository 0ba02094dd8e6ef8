"""A worker that crashes in native code, or before it can log, is heard: in the log, in its event and in what ends the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hsjournal.config import RunPaths
from tests.helpers.cli import hsjournal
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


def test_where_it_crashed_stands_in_the_log_and_in_the_event(model: Path, tmp_path: Path) -> None:
    prompts, run_dir = tmp_path / "prompts.jsonl", tmp_path / "run"
    row = {"input_ids": list(range(3, 30)), "loss_mask": [1] * 27}
    prompts.write_text("".join(json.dumps({"id": f"r{n}"} | row) + "\n" for n in range(2)))
    words = ("--prompts", prompts, "--model", model, "--max-strikes", "1", "--plain")
    done = hsjournal("run", run_dir, *words, HSJOURNAL_FAULTS="sink.opened=segv,row:1")
    assert done.code == 3, done
    log = (RunPaths.of(run_dir).logs / "worker.log").read_text()
    assert "the worker before said on its standard error" in log
    assert "Fatal Python error: Segmentation fault" in log
    assert "sink" in log.split("Fatal Python error")[1]  # where it was
    events = hsjournal("events", run_dir, "--kind", "worker_died").out.splitlines()
    assert events
    assert all("Fatal Python error: Segmentation fault" in json.loads(line)["detail"]["stderr"] for line in events)
