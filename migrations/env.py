"""Alembic's environment: the connection comes from hsjournal.journal.migrate, inside one BEGIN IMMEDIATE."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"], transaction_per_migration=False, transactional_ddl=False
)
context.run_migrations()
