"""Full and broken storage: a clear line, a pause, on again by itself, exit 5 past the limit; no row lost or failed."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsjournal.errors import ExitCode
from hsjournal.mirror import SNAPSHOT, Mirror
from hsjournal.watch.verdict import Verdict
from tests.helpers.drill import attached
from tests.helpers.drill.attached import Attached, Served
from tests.helpers.drill.stage import child_of, ended, wait_for, words
from tests.helpers.drill.stalls import held, outside
from tests.helpers.drill.truth import Findings
from tests.helpers.mounts import ext4, fill, tmpfs
from tests.helpers.removing import delete

ROWS = 16
PACE = 0.25
"""Seconds that each dump takes: the storage breaks in the middle of the run."""


def resumes(run: Attached, child: subprocess.Popen[bytes], what: str) -> None:
    """After healing it goes on by itself to the end, and the journal tells of the pause."""
    assert ended(child) == ExitCode.DONE, words(child)
    run.check()
    paused = [e["what"] for e in run.truth.events("paused")]
    assert what in paused
    assert sorted({e["what"] for e in run.truth.events("resumed")}) == sorted(set(paused))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A small tmpfs for the run's folders."""
    with tmpfs(tmp_path / "small", "3m") as mount:
        yield mount


def on_small_output(served: Served, small: Path) -> Attached:
    run = Attached(served, ROWS)
    run.stage.out_dir.parent.rmdir()
    run.stage.out_dir.parent.symlink_to(small)
    return run


@pytest.mark.root
def test_a_full_output_pauses_and_goes_on_when_there_is_room(served: Served, small: Path) -> None:
    run = on_small_output(served, small)
    with run.stage:
        child = run.run()
        run.wait_files(3, child)
        filler = fill(small, leave=24 << 10)
        line = run.wait_words("PAUSED", child)
        assert str(run.stage.out_dir) in line
        assert "is full" in line
        run.truth.look()
        time.sleep(1.5)
        assert child.poll() is None
        filler.unlink()
        resumes(run, child, "output")


@pytest.mark.root
def test_an_output_that_stays_full_ends_with_5_and_a_resume_finishes(served: Served, small: Path) -> None:
    run = on_small_output(served, small)
    with run.stage:
        child = run.run("--pause-limit", "2")
        run.wait_files(3, child)
        filler = fill(small, leave=24 << 10)
        assert ended(child) == ExitCode.NO_ROOM, words(child)
        assert "is full" in words(child)
        assert "resume" in words(child)
        run.truth.look()
        filler.unlink()
        again = run.run()
        assert ended(again) == ExitCode.DONE, words(again)
        run.check()


ANSWERS = (
    ("EDQUOT", "sink.writing", "is over its quota"),
    ("EDQUOT", "sink.opened", "is over its quota"),
    ("EIO", "sink.written", "answers with I/O errors"),
    ("EIO", "verify.reading", "answers with I/O errors"),
    ("EROFS", "sink.linking", "has become read-only"),
    ("ENOSPC", "sink.linked", "is full"),
    ("EACCES", "sink.opened", "does not work: Permission denied"),  # by a fault, since root is refused nothing
    ("EBUSY", "sink.linking", "does not work: Device or resource busy"),  # a stuck process holds the folder's lock
    ("ENOTCONN", "verify.reading", "does not work: Transport endpoint is not connected"),  # FUSE, its daemon gone
    ("EUCLEAN", "sink.published", "does not work: Structure needs cleaning"),
)


def test_what_a_disk_may_answer_is_waited_for(served: Served) -> None:
    """One trouble after the other, in one run: each is named, and each passes."""
    with attached.attached(served, 6 * len(ANSWERS)) as run:
        broken = [run.stage.base / f"broken-{i}" for i in range(len(ANSWERS))]
        faults = (f"{point}=errno:{code},while:{broken[i]}" for i, (code, point, _) in enumerate(ANSWERS))
        child = run.run("--max-in-flight", "2", faults="; ".join(faults))
        for file, (_, _, said) in zip(broken, ANSWERS, strict=True):
            run.wait_files(run.truth.finished() + 1, child)
            before = run.count_words(f"PAUSED: the output folder {run.stage.out_dir} {said}", child)
            file.touch()
            run.wait_words(f"PAUSED: the output folder {run.stage.out_dir} {said}", child, more_than=before)
            run.truth.look()
            file.unlink()
        resumes(run, child, "output")


@pytest.mark.root
def test_one_of_two_output_disks_freezes_and_the_other_goes_on(served: Served, tmp_path: Path) -> None:
    """What is under way on the frozen one waits for the thaw; all else goes to the other, and each sample has one file."""
    rows = 120
    with ext4(tmp_path, 160) as disk, attached.attached(served, rows) as run:
        second = disk.mount / "out"
        child = run.run("--max-in-flight", "8", "--out", str(second), "--stall-timeout", "120s")

        def there(folder: Path) -> int:
            return sum(1 for _ in folder.glob("*/*.ckpt"))

        wait_for(lambda: child.poll() is not None or there(second) >= 3, 90, "the second disk is used")
        assert child.poll() is None, words(child)
        with disk.frozen():
            before = there(second)
            rest = rows - before - 8  # at most so many are under way
            wait_for(lambda: child.poll() is not None or there(run.stage.out_dir) >= rest, 150, "the other goes on")
            assert child.poll() is None, words(child)
            assert there(second) <= before + 8
            (folder,) = run.stage.shm.glob("hsjournal-*/*/mirror")

            def told() -> dict[str, str | None]:
                return {
                    volume["path"]: volume["problem"] for volume in (Mirror(folder).read(SNAPSHOT) or {})["volumes"]
                }

            wait_for(lambda: told() == {str(run.stage.out_dir): None, str(second): "stuck"}, 40, "it is named")
            report = outside(run).asks("diagnose", "--json").json()
            rooms = [room["path"] for room in report["room"] if room["what"] == "output"]
            assert rooms == [str(run.stage.out_dir), str(second)]
        assert ended(child, 120) == ExitCode.DONE, words(child)
        assert there(second) + there(run.stage.out_dir) == rows
        done = run.stage.hsjournal("verify", str(run.stage.run_dir))
        assert ended(done) == ExitCode.DONE, words(done)
        assert run.truth.struck() == []


@pytest.mark.root
def test_a_disk_that_becomes_read_only(served: Served, tmp_path: Path) -> None:
    with ext4(tmp_path, 24) as disk, attached.attached(served, ROWS) as run:
        run.stage.out_dir.parent.rmdir()
        run.stage.out_dir.parent.symlink_to(disk.mount)
        shutil.rmtree(disk.mount / "lost+found")
        child = run.run()
        run.wait_files(3, child)
        wait_for(lambda: not disk.try_remount("ro"), 20, "remounted read-only")
        assert "read-only" in run.wait_words("PAUSED", child)
        disk.remount("rw")
        resumes(run, child, "output")


@pytest.mark.root
def test_a_disk_whose_ground_gives_way(served: Served, tmp_path: Path) -> None:
    """An image on a full tmpfs: the block device itself fails, and the file system may give up on it."""
    with tmpfs(tmp_path / "ground", "20m") as ground, ext4(tmp_path / "disk", 64, ground / "image") as disk:
        run = Attached(served, ROWS)
        with run.stage:
            run.stage.out_dir.parent.rmdir()
            run.stage.out_dir.parent.symlink_to(disk.mount)
            shutil.rmtree(disk.mount / "lost+found")
            child = run.run("--pause-limit", "4")
            run.wait_files(3, child)
            filler = fill(ground)
            assert ended(child) == ExitCode.NO_ROOM, words(child)
            assert any(said in words(child) for said in ("I/O errors", "read-only", "can't be written", "is full"))
            filler.unlink()
            disk.mend()
            again = run.run()
            assert ended(again) == ExitCode.DONE, words(again)
            findings = run.truth.judge(Findings())
            assert findings.lost == []
            assert findings.wrong == []
            assert run.truth.struck() == []


def test_an_output_folder_that_goes_away_is_waited_for(served: Served) -> None:
    """As an unmounted disk: it is not made anew, since it may be a mount; nothing is written beside it."""
    with attached.attached(served, ROWS) as run:
        child = run.run()
        run.wait_files(3, child)
        away = run.stage.base / "away"
        run.stage.out_dir.rename(away)
        assert "is gone" in run.wait_words("PAUSED", child)
        time.sleep(1)
        assert not run.stage.out_dir.exists()
        away.rename(run.stage.out_dir)
        resumes(run, child, "output")


def test_an_output_folder_that_was_deleted_loses_what_was_in_it_and_verify_says_so(served: Served) -> None:
    with attached.attached(served, ROWS) as run:
        child = run.run()
        run.wait_files(3, child)
        delete(run.stage.out_dir)
        assert "is gone" in run.wait_words("PAUSED", child)
        run.stage.out_dir.mkdir()
        assert ended(child) == ExitCode.DONE, words(child)
        assert run.truth.finished() < ROWS
        repair = run.stage.hsjournal("verify", str(run.stage.run_dir), "--repair")
        ended(repair)
        assert "missing" in words(repair, 1 << 20)
        again = run.run()
        assert ended(again) == ExitCode.DONE, words(again)
        run.check()


@pytest.mark.root
def test_a_full_hand_over_root_is_waited_for(served: Served, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "root", "80m") as mount, attached.served(served.model, PACE, mount / "dumps") as engine:
        with attached.attached(engine, ROWS) as run:
            child = run.run("--max-in-flight", "2")
            run.wait_files(3, child)
            filler = fill(mount)
            line = run.wait_words("PAUSED", child)
            assert str(run.stage.root) in line
            outside(run).finds(Verdict.SHM_FULL, str(run.stage.root), "make room in")
            time.sleep(4)  # longer than the engine waits for room
            assert child.poll() is None
            filler.unlink()
            assert ended(child) == ExitCode.DONE, words(child)
            run.check()

        with attached.attached(engine, ROWS) as run:
            child = run.run("--pause-limit", "2", "--max-in-flight", "2")
            run.wait_files(3, child)
            filler = fill(mount)
            assert ended(child) == ExitCode.NO_ROOM, words(child)
            filler.unlink()
            again = run.run()
            assert ended(again) == ExitCode.DONE, words(again)
            run.check()


def test_a_hand_over_root_that_is_deleted_is_made_again(served: Served) -> None:
    with attached.attached(served, ROWS) as run:
        child = run.run()
        run.wait_files(3, child)
        delete(run.stage.root)
        assert ended(child) == ExitCode.DONE, words(child)
        run.check()
        assert "root" in {e["what"] for e in run.truth.events("paused")}


def test_a_hand_over_root_that_cannot_be_made_again_is_named_while_it_lasts(served: Served) -> None:
    """A file stands in its place, as after a mistaken copy."""
    with attached.attached(served, ROWS) as run:
        child = run.run("--max-in-flight", "2")
        run.wait_files(3, child)
        away = run.stage.root.with_name("away")
        worker = wait_for(lambda: child_of(child.pid, "hsjournal.worker"), 20, "a worker lives")
        assert served.engine.process is not None
        with held(worker), held(served.engine.process.pid):  # either would make it again between the two calls
            run.stage.root.rename(away)
            run.stage.root.write_text("")
        outside(run).finds(Verdict.ROOT_GONE, str(run.stage.root), "mend it")
        run.stage.root.unlink()
        away.rename(run.stage.root)
        assert ended(child) == ExitCode.DONE, words(child)
        run.check()


@pytest.mark.root
def test_a_full_disk_under_the_journal_is_waited_for(served: Served, small: Path) -> None:
    with attached.attached(served, ROWS) as run:
        (small / "run").mkdir()
        run.stage.run_dir.symlink_to(small / "run")
        child = run.run()
        run.wait_files(3, child)
        filler = fill(small)
        assert "journal" in run.wait_words("PAUSED", child)
        time.sleep(1.5)
        assert child.poll() is None
        filler.unlink()
        resumes(run, child, "journal")


@pytest.mark.root
def test_a_journal_without_room_ends_with_5_and_a_resume_finishes(served: Served, small: Path) -> None:
    with attached.attached(served, ROWS) as run:
        (small / "run").mkdir()
        run.stage.run_dir.symlink_to(small / "run")
        child = run.run("--pause-limit", "2")
        run.wait_files(3, child)
        filler = fill(small)
        assert ended(child) == ExitCode.NO_ROOM, words(child)
        filler.unlink()
        again = run.run()
        assert ended(again) == ExitCode.DONE, words(again)
        run.check()
