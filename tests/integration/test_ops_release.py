"""`release`: rows that were consumed stay verified, their files are freed, and nothing calls them lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hsjournal.errors import ExitCode, UsageError
from hsjournal.journal.locks import Lock
from hsjournal.journal.store import Journal
from hsjournal.ops.release import Named, names_of_index, names_of_lines, release
from hsjournal.ops.subset import Subset
from hsjournal.ops.verify import verify
from hsjournal.states import State
from tests.helpers.cli import REPOSITORY, hsjournal
from tests.helpers.runs import MadeRun, make_run


def rows(*numbers: int) -> list[Named]:
    return [Named(row=number) for number in numbers]


def sound(run: MadeRun) -> int:
    report = verify(run.paths, Subset(), seed=0)
    assert report.exit_code is ExitCode.DONE, report
    assert not report.strangers.count
    return report.checked


def test_files_go_and_rows_stay(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 5)
    sizes = {row: path.stat().st_size for row, path in run.outputs().items()}
    done = release(run.paths, [Named("sample 1"), Named("sample 3", 3)])
    assert (done.rows, done.before, done.nbytes, done.other) == (2, 0, sizes[1] + sizes[3], ())
    assert (done.released_rows, done.released_bytes) == (2, sizes[1] + sizes[3])
    assert sorted(run.outputs()) == [0, 2, 4]
    assert set(run.states().values()) == {"verified"}
    assert run.row(1)["released_at"] is not None
    assert run.events("released") == [{"rows": 2, "bytes": done.nbytes}]
    lines = [json.loads(line) for line in (run.paths.run_dir / "index.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [0, 2, 4]
    assert sound(run) == 3
    assert verify(run.paths, Subset(), seed=0, repair=True).damaged == []
    again = release(run.paths, rows(1, 3, 4))
    assert (again.rows, again.before, again.nbytes) == (1, 2, sizes[4])


def test_beside_a_live_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED, State.PENDING])
    locks = [Lock(path) for path in (run.paths.supervisor_lock, run.paths.worker_lock)]
    for lock in locks:
        lock.acquire()
    with Journal(run.paths.journal) as journal:
        epoch = journal.epoch
        assert release(run.paths, rows(0)).rows == 1
        assert journal.epoch == epoch
        assert journal.released()[0] == 1
    for lock in locks:
        lock.release()


def test_what_can_not_be_released_releases_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED, State.PENDING, State.WRITTEN])
    for wanted, words in (
        (rows(0, 1), "row 1 .pending"),
        (rows(0, 2), "row 2 .written"),
        (rows(0, 99), "row 99"),
        ([Named("sample 0"), Named("nobody")], "nobody"),
        ([Named("sample 0", 2)], "sample 0"),
    ):
        with pytest.raises(UsageError, match=words):
            release(run.paths, wanted)
    assert run.row(0)["released_at"] is None
    assert sorted(run.outputs()) == [0, 2]


def test_another_file_under_the_name_is_left_and_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED, State.VERIFIED])
    run.outputs()[0].write_bytes(b"somebody's")
    done = release(run.paths, rows(0, 1))
    assert (done.rows, done.other) == (2, ("rows_0-2000/data_0.ckpt",))
    assert (run.out / "rows_0-2000/data_0.ckpt").read_bytes() == b"somebody's"


def test_killed_between_mark_and_file_the_next_call_frees(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 3)
    (tmp_path / "ids").write_text("sample 0\nsample 2\n")
    command = [
        sys.executable,
        "-m",
        "hsjournal.cli.main",
        "release",
        str(run.paths.run_dir),
        "--ids",
        str(tmp_path / "ids"),
    ]
    environment = os.environ | {"HSJOURNAL_FAULTS": "reap.deleting=kill"}
    killed = subprocess.run(command, env=environment, check=False, cwd=REPOSITORY, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [run.row(row)["released_at"] is None for row in range(3)] == [False, True, False]
    assert sorted(run.outputs()) == [0, 1, 2]
    assert verify(run.paths, Subset(), seed=0).strangers.count == 2
    done = hsjournal("release", run.paths.run_dir, "--ids", tmp_path / "ids", "--json")
    assert done.code == 0, done
    assert done.json()["nbytes"] > 0
    assert sorted(run.outputs()) == [1]
    assert sound(run) == 1


def test_by_an_index_and_from_the_command_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 3)
    index = tmp_path / "consumed.jsonl"
    index.write_text("".join(json.dumps({"row": r, "id": f"sample {r}", "tokens": 5}) + "\n" for r in (0, 1)))
    done = hsjournal("release", run.paths.run_dir, "--index", index)
    assert done.code == 0, done
    assert "2 rows released" in done.out
    told = hsjournal("status", run.paths.run_dir, "--json").json()
    assert told["released"]["rows"] == 2
    assert "released" in hsjournal("status", run.paths.run_dir).out
    index.write_text('{"row": 2}\n')
    refused = hsjournal("release", run.paths.run_dir, "--index", index)
    assert (refused.code, "line 1" in refused.err) == (2, True)
    assert hsjournal("release", run.paths.run_dir).code == 2


def test_names() -> None:
    assert names_of_lines(["a\n", "\n", " b \r\n"]) == [Named("a"), Named(" b ")]
    assert names_of_index(['{"row": 1, "id": "x"}\n', "\n"], "x") == [Named("x", 1)]
    for wrong in ("{}", "[]", '{"row": true, "id": "x"}', '{"row": 1, "id": 2}', "no"):
        with pytest.raises(UsageError, match="line 1 of there"):
            names_of_index([wrong], "there")
