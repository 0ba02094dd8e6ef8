"""What a test's own words name, is there: a table of faults whose tests are gone would promise what nobody checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
_FOLDERS = "contract|drills|integration|packaging|property|unit"
_FILE = re.compile(rf"(?:tests/)?(?:(?:{_FOLDERS})/)?test_\w+\.py")
_NAME = re.compile(r"\btest_[a-z0-9_]+\b")


def words_of(source: Path) -> str:
    return ast.get_docstring(ast.parse(source.read_text())) or ""


def functions_of(source: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, kinds)}


TOLD = [path for path in sorted(TESTS.rglob("test_*.py")) if _NAME.search(words_of(path))]


@pytest.mark.parametrize("source", TOLD, ids=lambda path: path.stem)
def test_every_test_and_file_that_is_named_exists(source: Path) -> None:
    text = words_of(source)
    for file in _FILE.findall(text):
        places = TESTS / file.removeprefix("tests/"), source.parent / file
        assert any(place.is_file() for place in places), f"{file} is named, and is not there"
    missing = set(_NAME.findall(_FILE.sub("", text))) - functions_of(source)
    assert not missing, f"{source.name} names tests that it has not: {sorted(missing)}"


def test_the_tables_are_looked_at() -> None:
    assert {"test_faults_states", "test_faults_server", "test_faults_handover"} <= {path.stem for path in TOLD}
