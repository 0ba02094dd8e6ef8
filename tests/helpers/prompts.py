"""Prompts files and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsjournal.journal.store import NewRow


class RowList:
    """The simplest thing that ingestion can write to: a list, with the journal's order of calls enforced."""

    def __init__(self) -> None:
        self.rows: list[NewRow] = []
        self.state = "new"
        self.found: dict[str, Any] = {}

    def start_ingest(self, run_id: str) -> None:
        """Start over."""
        assert self.state != "finished"
        self.rows, self.state = [], "started"

    def add_rows(self, rows: Sequence[NewRow]) -> None:
        """Keep the rows."""
        assert self.state == "started"
        assert rows
        self.rows.extend(rows)

    def finish_ingest(self, found: str | None = None) -> None:
        """All rows are in."""
        assert self.state == "started"
        self.found = json.loads(found or "{}")
        self.state = "finished"


def write_jsonl(path: Path, rows: Sequence[dict[str, Any] | bytes]) -> Path:
    """Write one line for each row; bytes go as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path
