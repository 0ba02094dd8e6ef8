"""The first journal: run, sample, prompt, state_count, event.

The triggers are not here: they follow from hsjournal.states and are renewed after every migration.
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_STATES = "'pending', 'sent', 'dumped', 'written', 'verified', 'failed', 'skipped'"
_ACTORS = "'ingest', 'worker', 'reconcile', 'repair', 'operator', 'adopt'"

_STATEMENTS = (
    """
    CREATE TABLE run (
        id INTEGER NOT NULL,
        run_id TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        created_at REAL NOT NULL,
        ingested_at REAL,
        finished_at REAL,
        PRIMARY KEY (id),
        CONSTRAINT run_single CHECK (id = 1)
    ) STRICT
    """,
    f"""
    CREATE TABLE sample (
        "row" INTEGER NOT NULL,
        sample_id TEXT NOT NULL,
        source TEXT NOT NULL,
        line INTEGER NOT NULL,
        num_tokens INTEGER NOT NULL,
        loss_tokens INTEGER NOT NULL,
        state TEXT NOT NULL,
        actor TEXT NOT NULL,
        reason TEXT,
        attempt INTEGER NOT NULL,
        strikes INTEGER NOT NULL,
        suspect INTEGER NOT NULL,
        epoch INTEGER NOT NULL,
        changed_at REAL NOT NULL,
        sent_at REAL,
        server TEXT,
        boot_id TEXT,
        source_xxh3 TEXT,
        output_path TEXT,
        output_bytes INTEGER NOT NULL,
        output_xxh3 TEXT,
        verify_method TEXT,
        verified_at REAL,
        PRIMARY KEY ("row"),
        CONSTRAINT sample_state CHECK (state IN ({_STATES})),
        CONSTRAINT sample_actor CHECK (actor IN ({_ACTORS})),
        CONSTRAINT sample_counts CHECK (num_tokens >= 0 AND attempt >= 0 AND strikes >= 0 AND output_bytes >= 0),
        CONSTRAINT sample_suspect_flag CHECK (suspect IN (0, 1)),
        CONSTRAINT sample_written_has_file CHECK (state NOT IN ('written', 'verified') OR
            (output_path IS NOT NULL AND output_xxh3 IS NOT NULL AND output_bytes > 0)),
        CONSTRAINT sample_file_only_if_written CHECK (state IN ('written', 'verified') OR output_bytes = 0),
        CONSTRAINT sample_verified_says_how CHECK (state <> 'verified' OR verify_method IS NOT NULL),
        CONSTRAINT sample_off_path_says_why CHECK (state NOT IN ('failed', 'skipped') OR reason IS NOT NULL)
    ) STRICT
    """,
    "CREATE UNIQUE INDEX sample_id_unique ON sample (sample_id) WHERE state <> 'skipped'",
    *(
        f"CREATE INDEX sample_{state} ON sample (\"row\") WHERE state = '{state}'"
        for state in ("pending", "sent", "dumped", "written", "failed")
    ),
    'CREATE INDEX sample_suspect ON sample ("row") WHERE suspect = 1',
    """
    CREATE TABLE prompt (
        "row" INTEGER NOT NULL,
        input_ids BLOB NOT NULL,
        loss_mask BLOB NOT NULL,
        PRIMARY KEY ("row"),
        FOREIGN KEY ("row") REFERENCES sample ("row")
    ) STRICT
    """,
    f"""
    CREATE TABLE state_count (
        state TEXT NOT NULL,
        rows INTEGER NOT NULL,
        tokens INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        PRIMARY KEY (state),
        CONSTRAINT state_count_state CHECK (state IN ({_STATES}))
    ) STRICT
    """,
    "INSERT INTO state_count (state, rows, tokens, bytes) VALUES "
    + ", ".join(f"({state}, 0, 0, 0)" for state in _STATES.split(", ")),
    """
    CREATE TABLE event (
        id INTEGER NOT NULL,
        "key" TEXT NOT NULL,
        at REAL NOT NULL,
        epoch INTEGER NOT NULL,
        kind TEXT NOT NULL,
        "row" INTEGER,
        detail TEXT NOT NULL,
        PRIMARY KEY (id),
        UNIQUE ("key")
    ) STRICT
    """,
)


def upgrade() -> None:
    """Create the tables."""
    from hsjournal import faults

    for statement in _STATEMENTS:
        op.execute(statement)
        faults.point("migrate.step")
