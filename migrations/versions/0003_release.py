"""Rows whose output was consumed and whose file was freed: they stay verified."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_STATEMENTS = (
    """
    ALTER TABLE sample ADD COLUMN released_at REAL
        CONSTRAINT sample_released_only_if_verified CHECK (released_at IS NULL OR state = 'verified')
    """,
    "CREATE INDEX sample_released ON sample (released_at, output_bytes) WHERE released_at IS NOT NULL",
)


def upgrade() -> None:
    """Add the column; no row of an earlier run was released."""
    from hsjournal import faults

    for statement in _STATEMENTS:
        op.execute(statement)
        faults.point("migrate.step")
