"""The supervisor's room: start the worker by exec, watch it, end it, start it anew. Never torch, SQLModel or alembic."""
