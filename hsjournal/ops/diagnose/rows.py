"""Whose is what lies in the hand-over root, and which request is the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hsjournal.dump.protocol import DONE, ERROR, RequestId
from hsjournal.dump.reader import parse_name

_WAITED_FOR = ("sent", "dumped", "written")


def named_rows(listing: Mapping[str, Any], run_id: str) -> list[int]:
    """The rows that the directories of a listing name."""
    rids = (parse_name(entry["name"])[0] for entry in listing.get("entries", ()))
    return sorted({r.row for r in rids if r is not None and r.run == run_id and r.row is not None})


def directories(
    listing: Mapping[str, Any], run_id: str, rows: Mapping[str, Mapping[str, Any]], now: float
) -> list[dict[str, Any]]:
    """Each name of the root: complete or not, its row and what the row waits for. ``rows`` by number, as text."""
    return [_directory(entry, run_id, rows, now) for entry in listing.get("entries", ())]


def _directory(
    entry: Mapping[str, Any], run_id: str, rows: Mapping[str, Mapping[str, Any]], now: float
) -> dict[str, Any]:
    rid, unpublished = parse_name(entry["name"])
    found: dict[str, Any] = {
        "name": entry["name"],
        "bytes": entry.get("bytes", 0),
        "age_s": round(now - entry["mtime"], 1) if "mtime" in entry else None,
        "complete": False,
        "row": None,
    }
    if entry["kind"] != "directory" or rid is None:
        return found | {"kind": "foreign", "owner": "nobody's of this run: left alone"}
    if rid.run != run_id:
        return found | {"kind": "foreign", "owner": f"run {rid.run}'s: left alone"}
    files = entry.get("files", {})
    found["kind"] = (
        "unfinished" if unpublished else "dump" if DONE in files else "failure" if ERROR in files else "partial"
    )
    found["complete"] = found["kind"] == "dump"
    if rid.row is None:
        return found | {"owner": "a probe's"}
    found |= {"row": rid.row, "attempt": rid.attempt}
    if unpublished:
        return found | {"owner": f"row {rid.row}'s, being written by the server, or left by a dead one"}
    return found | {"owner": _owner(rid, rows.get(str(rid.row)))}


def _owner(rid: RequestId, row: Mapping[str, Any] | None) -> str:
    if row is None:
        return f"row {rid.row}'s, as its name says (the journal was not asked)"
    if row["attempt"] != rid.attempt:
        return f"row {rid.row}'s of attempt {rid.attempt}; attempt {row['attempt']} is {row['state']}: superseded"
    if row["state"] in _WAITED_FOR:
        return f"row {rid.row}'s, which is {row['state']}: waited for"
    return f"row {rid.row}'s, which is {row['state']}"


def is_waited_for(directory: Mapping[str, Any]) -> bool:
    """Whether a complete dump will be of use."""
    return bool(directory["complete"]) and str(directory.get("owner", "")).endswith("waited for")


def next_request(journal: Mapping[str, Any], run_id: str) -> dict[str, Any] | None:
    """The request that would be sent next: the first pending row's next attempt."""
    row = journal.get("next")
    if row is None:
        return None
    rid = RequestId.sample(run_id, row["row"], row["attempt"] + 1, row["num_tokens"])
    return {
        "rid": str(rid),
        "row": row["row"],
        "sample_id": row["sample_id"],
        "tokens": row["num_tokens"],
        "strikes": row["strikes"],
    }


def requests(directories: Iterable[Mapping[str, Any]]) -> int:
    """How many complete dumps are waited for."""
    return sum(1 for d in directories if is_waited_for(d))
