"""Migrations: what they make, what they refuse, and that a death in the middle costs nothing."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, inspect
from sqlalchemy.schema import CreateTable
from sqlmodel import SQLModel

from hsjournal import models, states
from hsjournal.errors import ExitCode, HsjournalError, NoJournalError, NoRoomError, SchemaError
from hsjournal.journal import migrate as migrate_module
from hsjournal.journal import schema
from hsjournal.journal.migrate import migrate
from hsjournal.journal.reading import JournalReader
from hsjournal.journal.schema import bring_up_to_date, head, look, migrations_folder
from hsjournal.journal.store import Journal
from hsjournal.states import State
from tests.helpers.journals import started
from tests.helpers.mounts import fill, tmpfs


def run_migrate(run_dir: Path, faults: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hsjournal.journal.migrate", str(run_dir)],
        check=False, capture_output=True, text=True, timeout=60, env=os.environ | {"HSJOURNAL_FAULTS": faults},
    )  # fmt: skip


def sql(path: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement).fetchall()


def triggers(path: Path) -> dict[str, str]:
    return dict(sql(path, "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"))


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "journal.db"
    migrate(path)
    return path


# what they make


def described(engine: Any) -> dict[str, Any]:
    """Everything SQLAlchemy can see of a database."""
    seen = inspect(engine)
    return {
        table: {
            "columns": {c["name"]: (str(c["type"]), c["nullable"], c["primary_key"]) for c in seen.get_columns(table)},
            "checks": {c["name"]: " ".join(c["sqltext"].split()) for c in seen.get_check_constraints(table)},
            "indexes": {
                i["name"]: (i["column_names"], bool(i["unique"]), str(i["dialect_options"].get("sqlite_where", "")))
                for i in seen.get_indexes(table)
            },
            "unique": sorted(tuple(u["column_names"]) for u in seen.get_unique_constraints(table)),
            "foreign": [(f["constrained_columns"], f["referred_table"]) for f in seen.get_foreign_keys(table)],
            "primary": seen.get_pk_constraint(table)["constrained_columns"],
        }
        for table in seen.get_table_names()
        if table != "alembic_version"
    }


def test_the_migrated_schema_is_that_of_the_models(journal, tmp_path):
    theirs = create_engine(f"sqlite:///{tmp_path / 'models.db'}")
    names = [m.__tablename__ for m in (models.Run, models.Sample, models.Prompt, models.StateCount, models.Event)]
    SQLModel.metadata.create_all(theirs, tables=[SQLModel.metadata.tables[str(name)] for name in names])
    ours = create_engine(f"sqlite:///{journal}")
    assert described(ours) == described(theirs)
    assert set(described(ours)) == {"run", "sample", "prompt", "state_count", "event"}
    assert sorted(len(t["columns"]) for t in described(ours).values()) == [3, 4, 7, 7, 26]
    ours.dispose()
    theirs.dispose()


def test_every_table_is_strict_there_and_in_the_models(journal):
    tables = dict(sql(journal, "SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
    for table in SQLModel.metadata.sorted_tables:
        assert "STRICT" in str(CreateTable(table).compile(dialect=create_engine("sqlite://").dialect))
        assert tables[table.name].rstrip().endswith("STRICT")


def test_the_triggers_are_those_of_the_table_of_transitions(journal):
    assert triggers(journal) == states.trigger_sql()


def test_every_state_has_its_count(journal):
    found = sql(journal, "SELECT state, rows, tokens, bytes FROM state_count")
    assert sorted(found) == sorted((s.value, 0, 0, 0) for s in State)


def test_the_head_read_from_names_is_alembics(journal):
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    script = ScriptDirectory.from_config(config)
    assert head() == script.get_current_head() == look(journal)
    revisions = [r.revision for r in script.walk_revisions()]
    assert revisions == sorted(revisions, reverse=True), "revisions ascend, so that a newer one can be told by its name"


# running again


def test_running_twice_changes_nothing(journal):
    before = journal.read_bytes()
    assert migrate(journal) == head()
    bring_up_to_date(journal)
    assert journal.read_bytes() == before


def test_stale_triggers_are_renewed_without_a_migration(journal):
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute("DROP TRIGGER sample_attempt")
        connection.execute("DROP TRIGGER sample_keep")
        connection.execute("CREATE TRIGGER sample_keep BEFORE DELETE ON sample BEGIN SELECT 1; END")
        connection.execute("CREATE TRIGGER sample_of_old BEFORE DELETE ON sample BEGIN SELECT 1; END")
    bring_up_to_date(journal)
    assert triggers(journal) == states.trigger_sql()


@pytest.fixture
def two_revisions(tmp_path, monkeypatch):
    """A version of hsjournal with one migration more; its folder."""
    folder = tmp_path / "later" / "migrations"
    shutil.copytree(migrations_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / "0004_more.py").write_text(
        "from alembic import op\n"
        "from hsjournal import faults\n"
        "revision, down_revision, branch_labels, depends_on = '0004', '0003', None, None\n"
        "def upgrade():\n"
        "    op.execute('CREATE TABLE more (a INTEGER NOT NULL) STRICT')\n"
        "    faults.point('migrate.step')\n"
        "    op.execute('ALTER TABLE sample ADD COLUMN extra TEXT')\n"
        "    faults.point('migrate.step')\n"
    )

    def switch() -> None:
        monkeypatch.setattr(schema, "migrations_folder", lambda: folder)
        monkeypatch.setattr(migrate_module, "migrations_folder", lambda: folder)
        head.cache_clear()

    yield switch
    monkeypatch.undo()
    head.cache_clear()


def test_an_older_journal_is_copied_then_brought_up_to_date(tmp_path, two_revisions):
    path, _ = started(tmp_path)
    two_revisions()
    with pytest.raises(SchemaError, match=r"schema 0003, older than this hsjournal's 0004.*resume"):
        Journal(path)
    bring_up_to_date(path)
    assert look(path) == "0004"
    with Journal(path) as journal:
        assert journal.counts()[State.PENDING].rows == 3
    backup = Path(f"{path}.0003.bak")
    assert sql(backup, "SELECT version_num FROM alembic_version") == [("0003",)]
    assert sql(backup, "SELECT count(*) FROM sample") == [(3,)]
    assert not Path(f"{path}.0003.half").exists()


def test_an_older_journal_answers_what_it_can_and_says_what_brings_it_up_to_date(tmp_path, monkeypatch):
    earlier = tmp_path / "earlier" / "migrations"
    shutil.copytree(migrations_folder(), earlier, ignore=shutil.ignore_patterns("__pycache__"))
    (earlier / "versions" / "0003_release.py").unlink()
    path = tmp_path / "journal.db"
    with monkeypatch.context() as made:
        made.setattr(schema, "migrations_folder", lambda: earlier)
        made.setattr(migrate_module, "migrations_folder", lambda: earlier)
        head.cache_clear()
        assert migrate(path) == "0002"
    head.cache_clear()
    reader = JournalReader(path)
    assert reader.counts()[State.PENDING].rows == 0
    with pytest.raises(
        SchemaError, match=r"has schema 0002, older than this hsjournal's 0003.*`hsjournal resume` brings"
    ):
        reader.released()
    bring_up_to_date(path)
    assert reader.released() == (0, 0)


def test_the_copy_holds_what_lay_in_the_wal_only(tmp_path, two_revisions):
    path, _ = started(tmp_path)
    two_revisions()
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("UPDATE run SET run_id = 'inthewal'")
        writer.commit()
        assert b"inthewal" not in path.read_bytes()
        bring_up_to_date(path)
    assert sql(Path(f"{path}.0003.bak"), "SELECT run_id FROM run") == [("inthewal",)]


# death in the middle


@pytest.mark.parametrize("step", [1, 2, 7, 12])
def test_killed_inside_a_migration_the_next_start_completes(tmp_path, step):
    killed = run_migrate(tmp_path, f"migrate.step=kill@{step}")
    assert killed.returncode == -signal.SIGKILL
    assert look(tmp_path / "journal.db") is None  # nothing of it, not half of it
    done = run_migrate(tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, head()), done.stderr
    with Journal(tmp_path / "journal.db") as journal:
        journal.start_ingest("abcd")


def test_an_error_inside_a_migration_leaves_nothing_and_says_what(tmp_path):
    failed = run_migrate(tmp_path, "migrate.step=errno:ENOSPC@3")
    assert failed.returncode != 0
    assert look(tmp_path / "journal.db") is None
    assert run_migrate(tmp_path).returncode == 0


# refusals


def refusal(path: Path, kind: type[HsjournalError] = SchemaError) -> str:
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(kind) as caught:
        migrate(path)
    assert caught.value.remedy
    if before is not None:
        assert path.read_bytes() == before, "what is refused is not touched"
    return str(caught.value)


def test_a_newer_schema_is_refused_with_exit_12(journal, tmp_path):
    sql(journal, "UPDATE alembic_version SET version_num = '9999'")
    assert "9999" in refusal(journal)
    assert "newer" in refusal(journal)
    done = run_migrate(tmp_path)
    assert done.returncode == ExitCode.SCHEMA
    assert done.stderr.startswith("hsjournal: ")
    assert "Traceback" not in done.stderr
    for use in (Journal, bring_up_to_date):
        with pytest.raises(SchemaError, match="newer") as caught:
            use(journal)
        assert caught.value.exit_code is ExitCode.SCHEMA


def test_somebody_elses_database_is_refused_and_not_even_switched_to_wal(tmp_path):
    path = tmp_path / "journal.db"
    sql(path, "CREATE TABLE customers (id INTEGER)")
    assert "customers" in refusal(path)
    with pytest.raises(SchemaError, match="customers"):
        bring_up_to_date(path)


def test_another_alembic_database_is_not_taken_for_a_newer_journal(tmp_path):
    path = tmp_path / "journal.db"
    sql(path, "CREATE TABLE customers (id INTEGER)")
    sql(path, "CREATE TABLE alembic_version (version_num TEXT)")
    sql(path, "INSERT INTO alembic_version VALUES ('feed0123')")
    assert "customers" in refusal(path)


@pytest.mark.parametrize(
    "content", [b"not a database, but longer than a header " * 40, b"x", b"SQLite format 3\0" + b"\xff" * 500]
)
def test_garbage_is_refused(tmp_path, content):
    path = tmp_path / "journal.db"
    path.write_bytes(content)
    assert "journal" in refusal(path)


@pytest.mark.parametrize("length", [100, 4096, 20_000])
def test_a_truncated_journal_is_refused(journal, length):
    whole = journal.read_bytes()
    assert len(whole) > length
    journal.write_bytes(whole[:length])
    refusal(journal)
    for use in (Journal, bring_up_to_date):
        with pytest.raises(SchemaError) as caught:
            use(journal)
        assert "Restore" in str(caught.value)


def test_an_emptied_journal_is_no_journal_for_a_resume(journal):
    journal.write_bytes(b"")
    with pytest.raises(NoJournalError, match="empty"):
        Journal(journal)
    with pytest.raises(NoJournalError):
        bring_up_to_date(journal)


def test_opening_a_missing_journal_does_not_make_one(tmp_path):
    for use in (Journal, bring_up_to_date):
        with pytest.raises(NoJournalError, match="hsjournal run"):
            use(tmp_path / "journal.db")
    assert list(tmp_path.iterdir()) == []


def test_a_wal_without_its_database_is_not_replayed_into_a_fresh_one(tmp_path):
    path, _ = started(tmp_path)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import sqlite3,os;c=sqlite3.connect({str(path)!r});c.execute(\"UPDATE run SET run_id='old'\");c.commit();os.kill(os.getpid(),9)",
        ]
    )
    child.wait()
    assert Path(f"{path}-wal").stat().st_size > 0
    path.unlink()
    migrate(path)
    with Journal(path) as journal:
        assert not journal.is_ingested
        assert journal.counts()[State.PENDING].rows == 0


@pytest.mark.root
def test_a_read_only_file_system_is_refused_with_a_sentence(tmp_path):
    with tmpfs(tmp_path / "small", "4m") as mount:
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        done = run_migrate(mount)
        assert done.returncode == ExitCode.NO_ROOM
        assert "Traceback" not in done.stderr
        assert "permissions" in done.stderr


@pytest.mark.root
def test_a_full_disk_is_named_and_the_migration_completes_when_there_is_room(tmp_path):
    with tmpfs(tmp_path / "small", "1m") as mount:
        filler = fill(mount, leave=40_000)
        with pytest.raises(NoRoomError, match="full"):
            migrate(mount / "journal.db")
        filler.unlink()
        migrate(mount / "journal.db")


# where they lie


def test_packaged_migrations_win_over_those_beside_the_package(tmp_path, monkeypatch):
    package = tmp_path / "site" / "hsjournal"
    (package / "journal").mkdir(parents=True)
    (tmp_path / "site" / "migrations").mkdir()
    monkeypatch.setattr(schema, "__file__", str(package / "journal" / "schema.py"))
    assert migrations_folder() == tmp_path / "site" / "migrations"
    (package / "migrations").mkdir()
    assert migrations_folder() == package / "migrations"


def test_without_migrations_the_remedy_is_to_install_again(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "migrations_folder", lambda: tmp_path)
    head.cache_clear()
    try:
        with pytest.raises(SchemaError, match="Install hsjournal again"):
            head()
    finally:
        monkeypatch.undo()
        head.cache_clear()
