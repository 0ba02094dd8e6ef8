"""``scripts/test`` itself, in a small repository of its own: with what code it ends, and what it runs a second time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import REPOSITORY

GOOD, BAD = "def test_it(): pass\n", "def test_it(): assert False\n"
AT_THE_SECOND_LOOK = """
from pathlib import Path

def test_it():
    mark = Path(__file__).with_suffix(".seen")
    was_there = mark.exists()
    mark.touch()
    assert was_there
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The script and what it calls; setting up does nothing, since the environment is this one."""
    helpers = [f"tests/helpers/{name}.py" for name in ("__init__", "tiers", "second_look")]
    for name in ("scripts/test", "scripts/lib.sh", "tests/__init__.py", *helpers):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, target)
    setup = tmp_path / "scripts" / "setup"
    setup.write_text("#!/bin/sh\n")
    setup.chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for tier in ("unit", "contract", "property", "integration", "packaging", "drills"):
        put(tmp_path, tier, GOOD)
    return tmp_path


def put(repository: Path, tier: str, test: str) -> None:
    file = repository / "tests" / tier / f"test_{tier}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(test)


def ends(repository: Path, *words: str) -> tuple[int, str]:
    command = [str(repository / "scripts" / "test"), *words]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, text=True
    )
    return done.returncode, done.stdout


def test_with_all_green_it_ends_with_0(repository: Path) -> None:
    code, out = ends(repository)
    assert code == 0, out
    assert "5 passed" in out
    assert "1 passed" in out
    assert "once more" not in out
    assert ends(repository, "unit")[0] == 0


def test_a_drill_that_fails_by_chance_is_named_and_no_failure(repository: Path) -> None:
    put(repository, "drills", AT_THE_SECOND_LOOK)
    code, out = ends(repository)
    assert code == 0, out
    assert "==   tests/drills/test_drills.py::test_it" in out
    assert "FAILED tests/drills/test_drills.py::test_it" in out
    assert "want mending" in out


def test_a_drill_that_fails_again_is_a_failure(repository: Path) -> None:
    put(repository, "drills", BAD)
    code, out = ends(repository)
    assert code == 1, out
    assert "once more, alone" in out


def test_a_unit_test_gets_no_second_look(repository: Path) -> None:
    put(repository, "unit", AT_THE_SECOND_LOOK)
    code, out = ends(repository)
    assert code == 1, out
    assert "once more" not in out


def test_a_tier_that_cannot_be_collected_is_a_failure(repository: Path) -> None:
    put(repository, "drills", "import nowhere\n")
    code, out = ends(repository)
    assert code == 1, out
    assert "once more" not in out
