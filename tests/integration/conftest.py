"""Runs that several modules of this tier look at; each is made once."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tests.helpers.cli import REPOSITORY, Result, hsjournal


@dataclass(frozen=True)
class RealRun:
    """A finished run of SmolLM2-135M-Instruct over real text."""

    model: Path
    run_dir: Path
    result: Result

    @property
    def out_dir(self) -> Path:
        """The output folder."""
        return self.run_dir / "out"


@pytest.fixture(scope="session")
def trainers_python() -> str:
    """The python of the environment that has the trainers and nothing of ours."""
    made = subprocess.run([REPOSITORY / "scripts/trainers-env"], check=True, stdout=subprocess.PIPE, text=True)
    return made.stdout.strip()


@pytest.fixture(scope="session")
def smollm2_run(tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """A few conversations of different lengths, two turns in one of them."""
    made = subprocess.run([REPOSITORY / "scripts/smollm2-model"], check=True, stdout=subprocess.PIPE, text=True)
    folder = tmp_path_factory.mktemp("smollm2")
    rows = []
    for number, (name, text) in enumerate(sorted(topics.items())[:6]):
        turns = [
            {"role": "user", "content": f"Explain {name} in Python."},
            {"role": "assistant", "content": text.strip()[: 60 + 160 * number]},
        ]
        if number == 2:
            turns += [{"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "You are welcome."}]
        rows.append(json.dumps({"id": f"topics/{name}", "conversations": turns}))
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    model = Path(made.stdout.strip())
    result = hsjournal(
        "run", folder / "run", "--prompts", folder / "prompts.jsonl", "--model", model, "--dtype", "float32"
    )
    assert result.code == 0, result
    return RealRun(model, folder / "run", result)
