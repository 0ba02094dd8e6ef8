"""`verify`: every kind of damage is found and named, nothing sound is accused, and repair puts the rows back."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hsjournal.errors import ExitCode, HsjournalError, JournalLockedError, UsageError
from hsjournal.journal.locks import Lock
from hsjournal.journal.store import Journal
from hsjournal.ops.subset import Subset
from hsjournal.ops.verify import verify
from hsjournal.ops.verify_report import Report
from hsjournal.states import State
from tests.helpers.cli import hsjournal
from tests.helpers.runs import MadeRun, make_run

ALL = Subset()


def check(run: MadeRun, subset: Subset = ALL, *, repair: bool = False, seed: int = 0) -> Report:
    return verify(run.paths, subset, seed=seed, repair=repair)


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def cut_short(path: Path, rng: random.Random) -> None:
    size = path.stat().st_size
    os.truncate(path, rng.choice((0, 1, 100, size // 2, size - 1, rng.randrange(size))))


def flip_bit(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def zero_page(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    pages = [p for p in range(0, len(data), 4096) if any(data[p : p + 4096])]
    page = rng.choice(pages)
    data[page : page + 4096] = bytes(len(data[page : page + 4096]))
    path.write_bytes(data)


def append(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice((1, 22, 4096))))


HARMS: tuple[Callable[[Path, random.Random], None], ...] = (delete, cut_short, flip_bit, zero_page, append)
KINDS = {
    "delete": {"missing"},
    "cut_short": {"wrong_size"},
    "flip_bit": {"wrong_digest"},
    "zero_page": {"wrong_digest"},
    "append": {"wrong_size"},
    "swap": {"wrong_content"},
}


def test_300_damages_of_all_kinds_are_found_and_none_falsely(tmp_path: Path) -> None:
    rng = random.Random(7)
    rows = 400
    run = make_run(tmp_path, [State.VERIFIED] * rows, tokens=[4 + i % 9 for i in range(rows)])
    sound = check(run)
    assert (sound.checked, sound.damaged, sound.exit_code) == (rows, [], ExitCode.DONE)
    files = run.outputs()
    victims = rng.sample(range(rows), 300)
    done: dict[int, str] = {}
    for first, second in zip(victims[:50:2], victims[1:50:2], strict=True):  # another sample's content, 50 of them
        spare = tmp_path / "spare"
        os.rename(files[first], spare)
        os.rename(files[second], files[first])
        os.rename(spare, files[second])
        done |= {first: "swap", second: "swap"}
    for number, row in enumerate(victims[50:]):
        harm = HARMS[number % len(HARMS)]
        harm(files[row], rng)
        done[row] = harm.__name__
    report = check(run)
    found = {d.row: d for d in report.damaged}
    assert sorted(found) == sorted(victims)
    for row, name in done.items():
        assert found[row].kind in KINDS[name], (row, name, found[row])
        assert found[row].sample_id == f"sample {row}"
        assert found[row].path == f"rows_0-2000/data_{row}.ckpt"
    assert report.exit_code is ExitCode.FAILED_SAMPLES
    assert not report.unchecked


def test_without_repair_not_a_byte_changes(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED, State.WRITTEN, State.VERIFIED, State.PENDING])
    flip_bit(run.outputs()[0], random.Random(1))
    before = run.bytes_of()
    assert [d.row for d in check(run).damaged] == [0]
    assert run.bytes_of() == before


def test_it_reads_beside_a_live_run_and_repair_refuses(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED, State.PENDING])
    (run.out / "rows_0-2000" / "data_1.ckpt").write_bytes(b"on its way")
    (run.out / "rows_0-2000" / ".hsjournal-x.tmp").write_bytes(b"on its way")
    (run.out / "stranger.txt").write_bytes(b"")
    for path in (run.paths.supervisor_lock, run.paths.worker_lock):
        lock = Lock(path)
        lock.acquire()
        with Journal(run.paths.journal):  # a writer's WAL is there
            report = check(run)
        assert report.live
        assert report.strangers.paths == ("stranger.txt",)
        with pytest.raises(JournalLockedError):
            check(run, repair=True)
        lock.release()
    assert run.states() == {0: "verified", 1: "pending"}


def test_files_that_no_row_owns_are_listed_and_left(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED, State.PENDING])
    (run.out / "rows_0-2000" / "data_1.ckpt").write_bytes(b"of a pending row")
    (run.out / "notes").mkdir()
    (run.out / "notes" / "a.txt").write_bytes(b"")
    os.symlink("/", run.out / "link")
    report = check(run, repair=True)
    assert report.strangers.paths == ("link", "notes/a.txt", "rows_0-2000/data_1.ckpt")
    assert report.exit_code is ExitCode.DONE
    assert (run.out / "notes" / "a.txt").exists()
    assert (run.out / "rows_0-2000" / "data_1.ckpt").read_bytes() == b"of a pending row"


def test_repair_sets_aside_and_queues_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 4)
    with Journal(run.paths.journal) as journal:
        journal.finish()
        epoch = journal.epoch
    flip_bit(run.outputs()[1], random.Random(3))
    run.outputs()[2].unlink()
    report = check(run, repair=True)
    assert [(d.row, d.repaired) for d in report.damaged] == [(1, True), (2, True)]
    assert run.states() == {0: "verified", 1: "pending", 2: "pending", 3: "verified"}
    with Journal(run.paths.journal) as journal:
        assert journal.epoch > epoch
        assert journal.counts()[State.PENDING].nbytes == 0
    row = run.row(1)
    assert (row["actor"], row["output_path"], row["strikes"]) == ("repair", None, 0)
    assert row["reason"].startswith("verify: wrong_digest")
    assert sorted(e["kind"] for e in run.events("repaired")) == ["missing", "wrong_digest"]
    assert [p.name for p in run.paths.rejects.iterdir()] == ["rows_0-2000_data_1.ckpt.1"]
    again = check(run, repair=True)
    assert (again.checked, again.damaged, again.exit_code) == (2, [], ExitCode.DONE)


def test_a_written_row_goes_back_to_its_dump_if_that_is_there(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.WRITTEN, State.WRITTEN], keep_dumps=True)
    shutil.rmtree(next(p for p in run.root.iterdir() if "-1-1-" in p.name))
    for path in run.outputs().values():
        append(path, random.Random(0))
    assert [d.repaired for d in check(run, repair=True).damaged] == [True, True]
    assert run.states() == {0: "dumped", 1: "pending"}


def test_an_output_folder_that_is_gone_accuses_nobody(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 2)
    run.out.rename(tmp_path / "elsewhere")
    for repair in (False, True):
        with pytest.raises(HsjournalError, match="is not there"):
            check(run, repair=repair)
    assert not run.out.exists()
    assert set(run.states().values()) == {"verified"}


def test_a_file_that_can_not_be_judged_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 3)
    folder = run.out / "rows_0-2000"
    moved = tmp_path / "moved"
    folder.rename(moved)
    folder.symlink_to(moved)  # a folder that is a link is not followed
    report = check(run)
    assert len(report.unchecked) + len(report.damaged) == 3
    assert report.exit_code is not ExitCode.DONE


def test_parts_cover_everything_once_and_draws_repeat(tmp_path: Path) -> None:
    rows = [(row, 1000) for row in range(103)]
    parts = [Subset.parse(f"{n}/5").choose(rows, 0) for n in range(1, 6)]
    assert sorted(row for part in parts for row in part) == list(range(103))
    share = Subset.parse("10%")
    assert share.choose(rows, 1) == share.choose(rows, 1) != share.choose(rows, 2)
    assert len(share.choose(rows, 1)) == 10
    assert len(Subset.parse("5kB").choose(rows, 1)) == 5
    assert len(Subset.parse("5KiB").choose(rows, 1)) == 5
    assert len(Subset.parse("1B").choose(rows, 1)) == 1  # at least one
    assert Subset.parse("1GiB").choose(rows, 1) == list(range(103))
    run = make_run(tmp_path, [State.VERIFIED] * 10)
    assert check(run, Subset.parse("2/5")).checked == 2


@pytest.mark.parametrize("text", ["0/5", "6/5", "0%", "101%", "5", "-1%", "1/0", "0GiB", "half", "1/5/2"])
def test_what_is_no_subset_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Subset.parse(text)


def test_the_command_says_it_and_exits_accordingly(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 3)
    run_dir = run.paths.run_dir
    clean = hsjournal("verify", run_dir)
    assert (clean.code, "no damage" in clean.out) == (0, True), clean
    flip_bit(run.outputs()[1], random.Random(5))
    found = hsjournal("verify", run_dir, "--json")
    assert found.code == 3, found
    assert [(d["row"], d["kind"], d["repaired"]) for d in found.json()["damaged"]] == [(1, "wrong_digest", False)]
    told = hsjournal("verify", run_dir, "--subset", "100%", "--seed", "4")
    assert told.code == 3
    assert "DAMAGED row 1 (sample 1): wrong_digest" in told.out
    assert "--repair" in told.out
    assert "\x1b" not in told.out + told.err
    repaired = hsjournal("verify", run_dir, "--repair")
    assert repaired.code == 3
    assert f"hsjournal resume {run_dir}" in repaired.out
    assert hsjournal("verify", run_dir).code == 0
    nowhere = hsjournal("verify", tmp_path / "nowhere")
    assert nowhere.code == 10
    assert "Traceback" not in nowhere.err
    assert not (tmp_path / "nowhere").exists()
    assert hsjournal("verify", run_dir, "--subset", "7").code == 2
