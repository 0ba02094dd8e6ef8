"""What must be installed for what is to be written; asked before a run is made, so this imports nothing else."""

from __future__ import annotations

import importlib.util

from hsjournal.errors import UsageError


def need_pyarrow(what: str) -> UsageError:
    """Something can't be written without pyarrow."""
    return UsageError(f"{what} needs pyarrow, which is not installed", remedy="Install hsjournal[parquet].")


def require(format_name: str) -> None:
    """Refuse a format for which something is not installed.

    Raises:
        UsageError: with the remedy.
    """
    if format_name == "speculators" and importlib.util.find_spec("pyarrow") is None:
        raise need_pyarrow("format speculators")
