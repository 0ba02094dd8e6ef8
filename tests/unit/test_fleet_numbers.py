"""Every start of a shard has a number of its own, higher than all before it, however many start at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hsjournal.errors import HsjournalError, SchemaError
from hsjournal.fleet.badge import Badge
from hsjournal.fleet.numbers import LinkedNumbers
from tests.helpers.cli import REPOSITORY

CLAIMS, PROCESSES = 25, 6
PROGRAM = """
import sys
from pathlib import Path
from hsjournal.fleet.numbers import LinkedNumbers
numbers = LinkedNumbers(Path(sys.argv[1]), "f")
sys.stdin.readline()
print(*(numbers.claim("2/8", 0) for _ in range(int(sys.argv[2]))))
"""


def test_processes_that_race_get_different_numbers_and_each_a_rising_row(tmp_path: Path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(CLAIMS)]
    racing = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        for _ in range(PROCESSES)
    ]
    answers = []
    for process in racing:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in racing:
        out, _ = process.communicate(timeout=120)
        answers.append(list(map(int, out.split())))
    assert all(answer == sorted(answer) for answer in answers)
    assert sorted(number for answer in answers for number in answer) == list(range(1, CLAIMS * PROCESSES + 1))
    assert LinkedNumbers(tmp_path, "f").highest("2/8") == CLAIMS * PROCESSES
    assert [p.name for p in LinkedNumbers(tmp_path, "f").of("2/8").iterdir() if p.name.startswith(".")] == []


def test_shards_and_fleets_count_apart(tmp_path: Path):
    one, other = LinkedNumbers(tmp_path, "f"), LinkedNumbers(tmp_path, "g")
    assert [one.claim("1/2", 0), one.claim("1/2", 0), one.claim("2/2", 0), other.claim("1/2", 0)] == [1, 2, 1, 1]


def test_a_store_that_was_lost_does_not_take_a_shard_back(tmp_path: Path):
    assert LinkedNumbers(tmp_path / "new", "f").claim("1/2", above=7) == 8


def test_a_server_that_made_the_link_and_lost_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import os

    honest = os.link

    def forgetful(source: Path, target: Path) -> None:
        honest(source, target)
        raise FileExistsError(17, "File exists")  # what an NFS client says to the request that it sent again

    monkeypatch.setattr("hsjournal.fleet.numbers.os.link", forgetful)
    numbers = LinkedNumbers(tmp_path, "f")
    assert [numbers.claim("1/1", 0), numbers.claim("1/1", 0)] == [1, 2]


def test_a_store_that_is_away_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(HsjournalError, match="file"):
        LinkedNumbers(tmp_path / "file", "f").claim("1/1", 0)
    with pytest.raises(HsjournalError, match="mounted"):
        LinkedNumbers(tmp_path / "nowhere", "f").highest("1/1")


def test_a_badge_is_read_as_it_was_written(tmp_path: Path):
    badge = Badge("f", "2/8", 3, "node7", "/shared/out", "/shared")
    badge.write(tmp_path)
    assert Badge.read(tmp_path) == badge
    assert Badge.read(tmp_path / "elsewhere") is None
    (tmp_path / "fleet.json").write_text("{broken")
    with pytest.raises(SchemaError, match=r"fleet\.json"):
        Badge.read(tmp_path)
