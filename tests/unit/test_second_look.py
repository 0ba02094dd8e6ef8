"""Which failed tests ``scripts/test`` runs once more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.second_look import MOST, failed, main, worth_it

DRILL, WHOLE, UNIT = (
    "tests/drills/test_a.py::test_b[x y]",
    "tests/integration/test_c.py::test_d",
    "tests/unit/test_e.py::test_f",
)


def test_whole_programs_get_one_and_a_unit_test_decides_by_itself() -> None:
    assert worth_it([DRILL, WHOLE]) == [DRILL, WHOLE]
    assert worth_it([DRILL, UNIT]) == []
    assert worth_it([f"{DRILL}{n}" for n in range(MOST)]) != []
    assert worth_it([f"{DRILL}{n}" for n in range(MOST + 1)]) == []


def test_what_failed_is_read_from_pytests_own_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = tmp_path / "tests" / "drills"
    tests.mkdir(parents=True)
    (tests / "test_one.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    cache, other = tmp_path / "cache", tmp_path / "other"
    command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={cache}", "tests/drills"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    assert failed(cache) == ["tests/drills/test_one.py::test_bad"]
    assert main([str(other), str(cache)]) == 0
    assert capsys.readouterr().out == "tests/drills/test_one.py::test_bad\n"
    assert main([str(other)]) == 1
