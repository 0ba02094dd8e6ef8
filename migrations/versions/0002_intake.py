"""How each row's loss mask was found, where a row was cut, and what ingestion found in all."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_STATEMENTS = (
    "ALTER TABLE run ADD COLUMN intake TEXT",
    "ALTER TABLE sample ADD COLUMN mask_method TEXT",
    "ALTER TABLE sample ADD COLUMN cut_from INTEGER",
)


def upgrade() -> None:
    """Add the columns; rows of earlier runs leave them empty."""
    from hsjournal import faults

    for statement in _STATEMENTS:
        op.execute(statement)
        faults.point("migrate.step")
