"""Every connection is set up and read back, writers wait for each other, and network file systems are refused."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from functools import partial

import pytest

from hsjournal.errors import JournalLockedError, NoJournalError, SchemaError
from hsjournal.filesystems import NETWORK, file_system_type, is_network
from hsjournal.journal import pragmas
from hsjournal.journal.fence import Fence
from hsjournal.journal.migrate import migrate
from hsjournal.journal.pragmas import connect
from hsjournal.journal.store import Journal
from tests.helpers.journals import started


@pytest.fixture
def path(tmp_path):
    return started(tmp_path)[0]


WANTED = {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 30_000, "foreign_keys": 1}


def read_back(connection: sqlite3.Connection) -> dict[str, object]:
    return {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in WANTED}


def test_what_the_store_the_fence_and_a_plain_connection_run_with(path):
    with closing(connect(path)) as plain, Journal(path) as journal:
        fence = Fence(path, 1)
        fence()
        for connection in (plain, journal._connection, fence._local.connection):
            assert read_back(connection) == WANTED
            assert connection.isolation_level is None, "the driver begins no transaction of its own"
        fence._local.connection.close()


def test_a_pragma_that_does_not_stick_is_an_error(path, monkeypatch):
    real = sqlite3.connect

    class Stubborn(sqlite3.Connection):
        def execute(self, statement, *rest):
            if statement == "PRAGMA journal_mode=WAL":
                return super().execute("PRAGMA journal_mode=DELETE")
            return super().execute(statement, *rest)

    monkeypatch.setattr(sqlite3, "connect", partial(real, factory=Stubborn))
    with pytest.raises(SchemaError, match=r"did not take journal_mode=WAL.*'delete'"):
        connect(path)


def test_a_missing_journal_is_not_made_by_looking(tmp_path):
    with pytest.raises(NoJournalError):
        connect(tmp_path / "journal.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["per%20cent", "a ?mode=memory", "h#sh", "ünïcode", "ein\nzeilig"])
def test_any_folder_name_will_do(tmp_path, name):
    (tmp_path / name).mkdir()
    path, _ = started(tmp_path / name)
    with Journal(path) as journal:
        assert journal.epoch == 1
        assert (tmp_path / name / "journal.db-wal").exists()


def test_a_row_needs_its_sample(path):
    with closing(connect(path)) as connection, pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        connection.execute("INSERT INTO prompt VALUES (77, x'00', x'00')")


def test_a_second_writer_waits_instead_of_failing(path):
    """A deferred transaction that upgrades after another's commit fails at once, whatever the busy timeout is."""
    first, second = connect(path), connect(path)
    first.execute("BEGIN IMMEDIATE")
    first.execute("UPDATE run SET run_id = 'first'")
    seen: list[float] = []

    def write() -> None:
        begin = time.monotonic()
        second.execute("BEGIN IMMEDIATE")
        second.execute("UPDATE run SET run_id = run_id || '+second'")
        second.execute("COMMIT")
        seen.append(time.monotonic() - begin)

    thread = threading.Thread(target=write)
    thread.start()
    time.sleep(0.4)
    assert not seen
    first.execute("COMMIT")
    thread.join(10)
    assert 0.3 < seen[0] < 5
    assert first.execute("SELECT run_id FROM run").fetchone() == ("first+second",)
    first.close()
    second.close()


def test_the_store_begins_immediate(path):
    with Journal(path) as journal, closing(connect(path)) as other:
        with journal._writing():
            assert journal._connection.in_transaction
            other.execute("PRAGMA busy_timeout=0")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")


def test_no_read_outlives_its_statement(path):
    """A read transaction left open would keep the WAL from being folded in."""
    with Journal(path) as journal, closing(connect(path)) as other:
        journal.counts()
        journal.claimable(-1, 1)
        list(journal.all_rows())
        assert journal.epoch == 1
        fence = Fence(path, 1)
        fence()
        other.execute("UPDATE run SET run_id = 'x'")
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
        fence._local.connection.close()


def test_a_database_held_by_somebody_else_is_named(path, monkeypatch):
    monkeypatch.setattr(pragmas, "PRAGMAS", (("busy_timeout", "50", 50), *pragmas.PRAGMAS[1:]))
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("PRAGMA locking_mode=EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(JournalLockedError, match="locked by another program"):
            Journal(path)


# network file systems

LINE = "{id} 1 {device} / {mount} rw,relatime shared:1 - {kind} server:/export rw\n"


def table(tmp_path, *lines: str):
    path = tmp_path / "mountinfo"
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize("kind", [*sorted(NETWORK), "fuse.sshfs", "fuse", "fuse.s3fs"])
def test_a_network_file_system_is_refused_by_name(tmp_path, monkeypatch, kind):
    run_dir = tmp_path / "mnt" / "run"
    run_dir.mkdir(parents=True)
    root = LINE.format(id=1, device="8:1", mount="/", kind="ext4")
    fake = table(tmp_path, root, LINE.format(id=2, device="0:99", mount=tmp_path / "mnt", kind=kind))
    monkeypatch.setattr(pragmas, "file_system_type", partial(file_system_type, mountinfo=fake))
    for make in (migrate, Journal):
        (run_dir / "journal.db").unlink(missing_ok=True)
        with pytest.raises(SchemaError) as caught:
            make(run_dir / "journal.db")
        assert f"({kind})" in str(caught.value)
        assert "local disk" in str(caught.value)
        assert caught.value.exit_code == 12
        assert not (run_dir / "journal.db").exists()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuseblk", "fuse.fuse-overlayfs"])
def test_local_ones_are_not(kind):
    assert not is_network(kind)


def test_the_deepest_mount_wins_and_odd_names_are_read(tmp_path):
    deep = tmp_path / "with space" / "tab\there"
    deep.mkdir(parents=True)
    fake = table(
        tmp_path,
        LINE.format(id=1, device="8:1", mount="/", kind="ext4"),
        LINE.format(id=2, device="0:98", mount=f"{tmp_path}/with\\040space", kind="xfs"),
        LINE.format(id=3, device="0:99", mount=f"{tmp_path}/with\\040space/tab\\011here", kind="nfs4"),
        LINE.format(
            id=4, device="0:97", mount=f"{tmp_path}/with", kind="cifs"
        ),  # a prefix of the name, not of the path
        "garbage\n",
    )
    assert file_system_type(deep / "not" / "yet" / "there", fake) == "nfs4"
    assert file_system_type(tmp_path / "with space", fake) == "xfs"
    assert file_system_type(tmp_path, fake) == "ext4"


def test_of_two_mounts_on_one_folder_the_device_tells(tmp_path):
    device = tmp_path.stat().st_dev
    number = f"{device >> 8 & 0xFFF}:{device & 0xFF}"
    over = (
        LINE.format(id=2, device=number, mount=tmp_path, kind="xfs"),
        LINE.format(id=3, device="0:99", mount=tmp_path, kind="nfs"),
    )
    assert file_system_type(tmp_path, table(tmp_path, *over)) == "xfs"


def test_this_machines_own_table_is_read(tmp_path):
    assert file_system_type(tmp_path) != "unknown"
    assert file_system_type(tmp_path / "x" / "y") == file_system_type(tmp_path)
