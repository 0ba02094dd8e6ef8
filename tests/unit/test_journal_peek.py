"""Looking at a journal changes nothing, holds nothing up, and works whatever state it was left in."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest

from hsjournal.events import Event
from hsjournal.journal.pragmas import connect
from hsjournal.journal.reading import JournalReader
from hsjournal.journal.store import Journal
from hsjournal.states import State
from hsjournal.watch.children import PEEK, ChildError, peek_at
from tests.helpers.journals import RUN, empty_journal, put, started


def snapshot(folder: Path, *, but: str = "-shm") -> dict[str, tuple[bytes, int, int]]:
    """Every file's content, inode and time of change; the WAL's index in shared memory aside."""
    return {
        p.name: (p.read_bytes(), p.stat().st_ino, p.stat().st_mtime_ns)
        for p in folder.iterdir()
        if not p.name.endswith(but)
    }


def look(path: Path) -> None:
    """Everything that only looks."""
    assert sum(c["rows"] for c in peek_at(path)["counts"].values()) == 3
    reader = JournalReader(path)
    assert sum(c.rows for c in reader.counts().values()) == 3
    assert len(list(reader.all_rows())) == 3


@pytest.fixture
def writer(tmp_path):
    """A child that keeps the journal open, has committed something, and waits."""
    path, _ = started(tmp_path)
    code = f"""
        import sys
        from pathlib import Path
        from hsjournal.journal.store import Journal
        from tests.helpers.journals import put
        from hsjournal.states import State
        journal = Journal(Path({str(path)!r}))
        put(journal, 0, State.SENT, 1)
        print("ready", flush=True)
        sys.stdin.readline()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "ready\n"
    yield path, child
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()


def test_what_peek_tells(tmp_path):
    path, epoch = started(tmp_path)
    with Journal(path) as journal:
        put(journal, 1, State.VERIFIED, epoch)
        put(journal, 2, State.FAILED, epoch, reason="too hot", strikes=3)
        journal.apply([], epoch, [Event(f"e{n}", None, at=float(n)) for n in range(20)])
    told = peek_at(path)
    assert told["run"]["run_id"] == RUN
    assert told["run"]["epoch"] == 1
    assert told["counts"]["verified"] == {"rows": 1, "tokens": 5, "bytes": 100}
    assert {s: c["rows"] for s, c in told["counts"].items() if c["rows"]} == {"pending": 1, "verified": 1, "failed": 1}
    assert told["failed"] == [{"row": 2, "sample_id": "s2", "reason": "too hot", "strikes": 3}]
    assert [e["kind"] for e in told["events"]] == [f"e{n}" for n in range(12, 20)]


def test_a_clean_journal_stays_as_it_is(tmp_path):
    path, _ = started(tmp_path)
    before = snapshot(tmp_path, but="nothing")
    assert set(before) == {"journal.db"}
    look(path)
    assert snapshot(tmp_path, but="nothing") == before


def test_a_live_writers_journal_stays_as_it_is(writer, tmp_path):
    path, child = writer
    before = snapshot(tmp_path)
    assert set(before) == {"journal.db", "journal.db-wal"}
    assert before["journal.db-wal"][0]
    look(path)
    assert snapshot(tmp_path) == before
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.wait(10) == 0


def test_a_killed_writers_journal_stays_as_it_is_and_what_it_committed_is_seen(writer, tmp_path):
    path, child = writer
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = snapshot(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    look(path)
    assert peek_at(path)["counts"]["sent"]["rows"] == 1
    assert JournalReader(path).counts()[State.SENT].rows == 1
    assert snapshot(tmp_path) == before
    assert {p.name for p in tmp_path.iterdir()} == names


def test_polling_does_not_pin_the_wal(tmp_path):
    path, _ = started(tmp_path)
    with closing(connect(path)) as raw:
        raw.execute("PRAGMA wal_autocheckpoint=0")
        pollers = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import sys;sys.path.insert(0,{str(PEEK.parent)!r});import peek\nwhile True: peek.peek({str(path)!r})",
                ]
            )
            for _ in range(2)
        ]
        try:
            time.sleep(0.5)
            for number in range(500):
                raw.execute("UPDATE run SET created_at = ?", (number,))
                raw.execute("PRAGMA wal_checkpoint(PASSIVE)")
            # Pinned from the start, 500 updates would be more than 2 MB.
            assert Path(f"{path}-wal").stat().st_size < 1 << 20
            deadline = time.monotonic() + 10
            while raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                assert time.monotonic() < deadline
            assert Path(f"{path}-wal").stat().st_size == 0
        finally:
            for poller in pollers:
                assert poller.poll() is None, "looking never fails beside a writer"
                poller.kill()
                poller.wait()


def test_a_writer_that_comes_and_goes_is_never_in_the_way(tmp_path):
    """The WAL appears and vanishes with each opening: the look at it and the opening may fall on two sides of that."""
    path, _ = started(tmp_path)
    code = f"""
        import sys
        from pathlib import Path
        from hsjournal.journal.store import Journal
        for n in range(150):
            with Journal(Path({str(path)!r})) as journal:
                journal.finish()
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    sys.path.insert(0, str(PEEK.parent))
    try:
        import peek  # type: ignore[import-not-found]

        looks = 0
        while child.poll() is None:
            assert sum(c["rows"] for c in peek.peek(str(path))["counts"].values()) == 3
            assert sum(c.rows for c in JournalReader(path).counts().values()) == 3
            looks += 1
    finally:
        sys.path.remove(str(PEEK.parent))
        child.wait()
    assert child.returncode == 0
    assert looks > 20


@pytest.mark.parametrize("name", ["per%20cent", "a ?mode=rwc", "h#sh", "ünï"])
def test_any_folder_name_will_do(tmp_path, name):
    (tmp_path / name).mkdir()
    look(started(tmp_path / name)[0])


def test_what_is_no_journal_is_an_error_in_one_line(tmp_path):
    path = tmp_path / "journal.db"
    with pytest.raises(ChildError, match="is missing"):
        peek_at(path)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"garbage" * 1000)
    with pytest.raises(ChildError, match="is damaged"):
        peek_at(path)
    empty_journal(tmp_path)
    assert peek_at(path)["run"] is None


def test_it_starts_without_site_packages_or_anything_of_ours(tmp_path):
    path, _ = started(tmp_path)
    code = f"import sys, runpy; sys.argv = ['peek', {str(path)!r}]; runpy.run_path({str(PEEK)!r}, run_name='__main__'); print(); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True)
    answer, modules = done.stdout.strip().splitlines()
    assert json.loads(answer)["run"]["run_id"] == RUN
    assert not [m for m in ("hsjournal", "sqlalchemy", "psutil", "asyncio") if f"'{m}'" in modules]


def test_a_folder_that_may_not_be_written_can_be_looked_at(tmp_path):
    """Another user's look (here: this one's, after dropping root)."""
    if os.geteuid() != 0:
        pytest.skip("needs root to drop it")
    path, _ = started(tmp_path)
    # pytest's folders are closed to others: a way in is opened for the length of the test.
    opened = [p for p in [tmp_path, *tmp_path.parents] if str(p) != "/" and not p.stat().st_mode & 0o001]
    before = {p: p.stat().st_mode for p in opened}
    script = tmp_path / "peek.py"
    script.write_bytes(PEEK.read_bytes())
    path.chmod(0o644)
    try:
        for p in opened:
            p.chmod(0o755)
        python = "/usr/bin/python3"
        if not os.access(python, os.X_OK):
            pytest.skip("no system Python that another user may run")
        done = subprocess.run(
            [python, "-I", "-S", str(script), str(path)],
            check=False,
            capture_output=True,
            text=True,
            user=65534,
            group=65534,
        )
    finally:
        for p, mode in before.items():
            p.chmod(mode & 0o7777)
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["run"]["run_id"] == RUN


def test_the_database_alone_is_no_copy_but_the_backup_is(tmp_path):
    """FAULTS F9: what was committed since the last checkpoint lies in the WAL only."""
    path, _ = started(tmp_path)
    with Journal(path) as journal:
        put(journal, 0, State.SENT, 1)
        alone = tmp_path / "alone"
        alone.mkdir()
        (alone / "journal.db").write_bytes(path.read_bytes())
        whole = tmp_path / "whole.db"
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(whole)) as target:
            source.backup(target)
        assert JournalReader(alone / "journal.db").counts()[State.SENT].rows == 0
        assert JournalReader(whole).counts()[State.SENT].rows == 1
