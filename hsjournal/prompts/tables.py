"""Tables of prompts: Parquet files, and dataset folders as Hugging Face's ``save_to_disk`` leaves them.

Both are read by pyarrow alone, a few rows at a time. Only the columns that mean something here are read. A struct's
column that is null counts as absent: tables give every row the columns of all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hsjournal import config
from hsjournal.errors import PromptsError
from hsjournal.prompts.readers import Line, need_pyarrow, unreadable
from hsjournal.prompts.records import COLUMNS
from hsjournal.prompts.refusal import Refusal, RowRefusedError

BATCH_ROWS = 64


class _Table:
    """What both kinds share: the identity of their files, and rows from batches."""

    def __init__(self, path: Path, name: str, files: list[Path]) -> None:
        self.path, self.name = path, name
        self._files = files
        self._stats = [_stat(file) for file in files]
        self.nbytes = sum(size for size, _ in self._stats)
        self._identity: config.Source | None = None
        self._done = 0.0

    @property
    def bytes_read(self) -> int:
        """How far the table has been read: its share of rows, as bytes."""
        return round(self._done * self.nbytes)

    def identity(self) -> config.Source:
        """Path, size and digest of what was read."""
        if self._identity is None:
            raise RuntimeError(f"{self.path} has not been read yet")
        return self._identity

    def count(self) -> int:
        """How many rows there are, by the files' own word."""
        raise NotImplementedError

    def _batches(self) -> Iterator[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Line]:
        """The rows, numbered from 1.

        Raises:
            PromptsError: when the table can't be read on, or changed meanwhile.
        """
        arrow = need_pyarrow(self.path, "a table")
        self._identity = identity_of(self.path, self._files)
        total, number = max(1, self.count()), 0
        try:
            for batch in self._batches():
                for value in _rows(batch):
                    number += 1
                    self._done = number / total
                    yield Line(number, value)
        except (arrow.ArrowException, OSError) as error:
            raise _damaged(self.path, f"row {number + 1:,}", error) from error
        if [_stat(file) for file in self._files] != self._stats:
            raise PromptsError(
                f"{self.path} changed while it was read", remedy="Wait until it is whole, then begin again."
            )


class Parquet(_Table):
    """A Parquet file.

    Args:
        path: the file.
        name: see :class:`hsjournal.prompts.readers.Source`.

    Raises:
        PromptsError: when it is none, or pyarrow is not installed.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name, [path])
        self._arrow = need_pyarrow(path, "a Parquet file")
        self._rows = int(self._open().metadata.num_rows)

    def count(self) -> int:
        """How many rows the file says it has."""
        return self._rows

    def _open(self) -> Any:
        from pyarrow import parquet

        try:
            # Without its read-ahead a row group is decoded piece by piece, however large it is.
            return parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=1 << 20)
        except (self._arrow.ArrowException, OSError) as error:
            raise _damaged(self.path, "its footer", error) from error

    def _batches(self) -> Iterator[Any]:
        with self._open() as file:
            wanted = [name for name in file.schema_arrow.names if name in COLUMNS]
            if not wanted:  # the row is refused for it, by what it has
                wanted = file.schema_arrow.names[:1]
            yield from file.iter_batches(BATCH_ROWS, columns=wanted, use_threads=False)


class DatasetFolder(_Table):
    """A dataset folder with ``state.json`` and Arrow files, as ``Dataset.save_to_disk`` writes it.

    Args:
        path: the folder.
        name: see :class:`hsjournal.prompts.readers.Source`.

    Raises:
        PromptsError: when it is none that can be read whole, or pyarrow is not installed.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name, dataset_files(path))
        self._arrow = need_pyarrow(path, "a dataset folder")
        try:
            self._rows = sum(int(batch.num_rows) for batch in self._stored())
        except (self._arrow.ArrowException, OSError) as error:
            raise _damaged(path, "its Arrow files", error) from error

    def count(self) -> int:
        """How many rows the files hold."""
        return self._rows

    def _stored(self) -> Iterator[Any]:
        """The record batches as they lie in the mapped files; nothing is copied."""
        for file in self._files:
            with self._arrow.memory_map(str(file)) as mapped:
                try:
                    reader = self._arrow.ipc.open_stream(mapped)
                except self._arrow.ArrowInvalid:
                    whole = self._arrow.ipc.open_file(mapped)
                    yield from (whole.get_batch(n) for n in range(whole.num_record_batches))
                else:
                    yield from reader

    def _batches(self) -> Iterator[Any]:
        for batch in self._stored():
            wanted = [name for name in batch.schema.names if name in COLUMNS] or batch.schema.names[:1]
            chosen = batch.select(wanted)
            yield from (chosen.slice(at, BATCH_ROWS) for at in range(0, chosen.num_rows, BATCH_ROWS))


def is_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote it."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a dataset folder, in order.

    Raises:
        PromptsError: when it is none, holds several splits, or names files that it can't have.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in folder.iterdir() if (child / "state.json").is_file())
        if len(splits) == 1:
            return dataset_files(folder / splits[0])
        raise PromptsError(
            f"{folder} holds {len(splits)} splits ({', '.join(splits)})",
            remedy=f"Name those that you want, as --prompts {folder / (splits or ['train'])[0]}.",
        )
    try:
        state = json.loads((folder / "state.json").read_bytes())
        names = [str(item["filename"]) for item in state["_data_files"]]
    except OSError as error:
        raise PromptsError(
            f"{folder} is a folder, and no dataset ({error.strerror or error}: state.json)",
            remedy=f"Name a file, a dataset folder that save_to_disk wrote, or a pattern: --prompts '{folder}/*.parquet'.",
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise PromptsError(
            f"{folder / 'state.json'} is not what save_to_disk writes: {error}", remedy="Write it again."
        ) from None
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise PromptsError(
            f"{folder} is a selection of rows over other data (an indices mapping)",
            remedy="Write it with `dataset.flatten_indices().save_to_disk(…)`.",
        )
    if bad := next((name for name in names if os.path.basename(name) != name), None):
        raise PromptsError(
            f"{folder / 'state.json'} names the file {bad!r}, outside the folder", remedy="Write it again."
        )
    return [folder / name for name in names]


def identity_of(path: Path, files: list[Path]) -> config.Source:
    """Path, size and SHA-256: of a file its bytes, of a folder its files' names, sizes and bytes in order.

    Raises:
        PromptsError: when one can't be read.
    """
    digest, total = hashlib.sha256(), 0
    for file in files:
        try:
            with file.open("rb") as stream:
                if file != path:
                    size = os.fstat(stream.fileno()).st_size
                    digest.update(f"{file.name}\0{size}\0".encode("utf-8", "surrogateescape"))
                while piece := stream.read(1 << 20):
                    digest.update(piece)
                    total += len(piece)
        except OSError as error:
            raise unreadable(file, error) from None
    return config.Source(os.path.abspath(path), total, digest.hexdigest())


def _rows(batch: Any) -> Iterator[dict[str, Any] | RowRefusedError]:
    try:
        rows: list[Any] = batch.to_pylist()
    except UnicodeDecodeError:  # which row's?
        rows = [_row(batch, n) for n in range(batch.num_rows)]
    for row in rows:
        yield row if isinstance(row, RowRefusedError) else _without_nulls(row)


def _row(batch: Any, n: int) -> dict[str, Any] | RowRefusedError:
    try:
        row: dict[str, Any] = batch.slice(n, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return RowRefusedError(Refusal.BROKEN_UNICODE, f"not UTF-8: {error.reason} at byte {error.start + 1} of a text")
    return row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(item) for item in value]
    return value


def _stat(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise unreadable(file, error) from None
    return found.st_size, found.st_mtime_ns


def _damaged(path: Path, where: str, error: Exception) -> PromptsError:
    return PromptsError(
        f"{path} can't be read ({where}): {error}", remedy="It is cut short or damaged; fetch it again."
    )
