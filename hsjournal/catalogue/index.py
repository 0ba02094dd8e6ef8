"""The index of an output folder: one line for each file that is verified and there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hsjournal.catalogue.needs import need_pyarrow
from hsjournal.catalogue.whole import replaced
from hsjournal.journal.reading import BATCH, Reading
from hsjournal.states import State

NAME, PARQUET = "index.jsonl", "index.parquet"


@dataclass(frozen=True, slots=True)
class Entry:
    """One verified file.

    Args:
        row: 0-based position in the input.
        id: of the sample.
        file: relative to the output folder; the index itself lies in the run directory.
        tokens: rows of every state.
        loss_tokens: of them, those that count for the loss.
        bytes: of the file.
        xxh3_128: over the whole file.
    """

    row: int
    id: str
    file: str
    tokens: int
    loss_tokens: int
    bytes: int
    xxh3_128: str


def entries(journal: Reading) -> Iterator[Entry]:
    """The verified rows whose files were not released, ascending, in short reads."""
    after = -1
    while batch := journal.rows_in(State.VERIFIED, after, BATCH):
        after = batch[-1]["row"]
        for row in batch:
            if row.get("released_at") is None:
                yield Entry(
                    row=row["row"],
                    id=row["sample_id"],
                    file=row["output_path"],
                    tokens=row["num_tokens"],
                    loss_tokens=row["loss_tokens"],
                    bytes=row["output_bytes"],
                    xxh3_128=row["output_xxh3"],
                )


def write_index(journal: Reading, folder: Path, fence: Callable[[], None] = lambda: None) -> int:
    """Write ``index.jsonl`` into ``folder``, whole or not at all; how many lines it has.

    Raises:
        FencedError: from ``fence``.
        OSError: as the storage answers.
    """
    return write_entries(entries(journal), folder / NAME, fence)


def write_entries(found: Iterable[Entry], path: Path, fence: Callable[[], None] = lambda: None) -> int:
    """Write an index of these files to ``path``, whole or not at all; how many lines it has.

    Raises:
        FencedError: from ``fence``.
        OSError: as the storage answers.
    """
    count = 0
    with replaced(path, fence) as file:
        for entry in found:
            file.write(json.dumps(asdict(entry), separators=(",", ":")).encode() + b"\n")
            count += 1
    return count


def write_parquet(journal: Reading, folder: Path) -> int:
    """The same as ``index.parquet``.

    Raises:
        UsageError: when pyarrow is not installed.
        OSError: as the storage answers.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise need_pyarrow("an index in Parquet") from None
    columns: dict[str, list[object]] = {name: [] for name in Entry.__slots__}
    for entry in entries(journal):
        for name, value in asdict(entry).items():
            columns[name].append(value.encode("utf-8", "replace").decode() if isinstance(value, str) else value)
    integer, text = pa.int64(), pa.string()
    kinds = {"id": text, "file": text, "xxh3_128": text}
    table = pa.table({n: pa.array(values, type=kinds.get(n, integer)) for n, values in columns.items()})
    with replaced(folder / PARQUET) as file:
        pq.write_table(table, file)
    return int(table.num_rows)
