"""A run's verified rows in another trainer's format: read, held against the journal, written anew, read back.

May be done beside a live run, as often as wanted: each call adds what has been verified since. Each file is published
whole (as in a run), and its line in the export's record is written after it; so a call that was killed is gone on with
by the same call. A file that lies there without a line is compared byte by byte and taken.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from hsjournal.catalogue.beside import write_for
from hsjournal.catalogue.index import NAME, Entry, write_entries
from hsjournal.catalogue.needs import require
from hsjournal.config import Manifest, RunPaths
from hsjournal.errors import DumpRejectedError, ExitCode, UsageError
from hsjournal.journal.reading import JournalReader
from hsjournal.ops.custody import need_output
from hsjournal.ops.foreign import ForeignError, read_foreign
from hsjournal.ops.planes import as_dump
from hsjournal.ops.verify_report import has_file
from hsjournal.sink.folders import make_output_folder
from hsjournal.sink.formats import layout_named, refuse_wrong_norm
from hsjournal.sink.output import Output
from hsjournal.sink.sample import OutputSample, Written
from hsjournal.sink.verify import Damage, DamageError
from hsjournal.states import State
from hsjournal.worker.recover import sample_of

THREADS = 3
RECORD, ABOUT = ".hsjournal-export.jsonl", ".hsjournal-export.json"
_TELL_EVERY = 0.2


@dataclass(frozen=True, slots=True)
class Damaged:
    """A row that was not exported since its file, or what was read back of the new one, is not what it must be."""

    row: int
    sample_id: str
    detail: str


@dataclass(slots=True)
class Exported:
    """What was done.

    Args:
        written: files made by this call.
        before: made by earlier calls.
        nbytes: of the files made now.
        released: verified rows whose files were freed, so that there is nothing to export.
        damaged: rows left out.
    """

    written: int = 0
    before: int = 0
    nbytes: int = 0
    released: int = 0
    seconds: float = 0.0
    damaged: list[Damaged] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        """3 when rows were left out for damage, else 0."""
        return ExitCode.FAILED_SAMPLES if self.damaged else ExitCode.DONE

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def export(
    paths: RunPaths, format_name: str, out_dir: Path, tell: Callable[[int, int, int], None] = lambda *_: None
) -> Exported:
    """Write every verified row, that was not released, into ``out_dir`` in another format.

    Args:
        paths: of the run.
        format_name: of the new files.
        out_dir: empty or missing, or of an earlier call for the same run and format.
        tell: called now and then with rows done, rows in all, and bytes written.

    Raises:
        UsageError: when the format can't be made of this run, or ``out_dir`` is used by something else.
        NoJournalError: when there is no run.
        OSError: as the storage answers; the same call goes on later.
    """
    manifest = Manifest.load(paths.manifest)
    _refuse(manifest, format_name)
    for folder in manifest.out_dirs:
        need_output(Path(folder))
    out_dir = out_dir.absolute()
    _take_folder(out_dir, {"run_id": manifest.run_id, "format": format_name})
    target = replace(manifest, format=format_name, out_dir=str(out_dir), options={})
    began, rejects = time.monotonic(), out_dir.parent / f"{out_dir.name}.rejects"
    with JournalReader(paths.journal) as journal, closing(Output(target, rejects)) as output:
        work = _Export(manifest, journal, output, tell)
        with (out_dir / RECORD).open("a+b") as record:
            work.run(record)
        write_for(target, journal, work.entries())
        write_entries(work.entries(), out_dir / NAME)
    work.report.seconds = time.monotonic() - began
    return work.report


def _refuse(manifest: Manifest, format_name: str) -> None:
    wanted, held = layout_named(format_name), layout_named(manifest.format)
    require(format_name)
    if held.drops_final:
        raise UsageError(
            f"the run's files (format {held.name}) hold no final state, so no other format can be made of them",
            remedy="Extract again in another format.",
        )
    refuse_wrong_norm(wanted, manifest.final_norm)


def _take_folder(out_dir: Path, about: dict[str, str]) -> None:
    """Make the folder, or find that it is of an earlier call for the same."""
    make_output_folder(out_dir)
    try:
        found = json.loads((out_dir / ABOUT).read_bytes())
    except FileNotFoundError:
        if any(out_dir.iterdir()):
            raise UsageError(
                f"{out_dir} is not empty, and no earlier export made it", remedy="Name another folder with --out."
            ) from None
        (out_dir / ABOUT).write_text(json.dumps(about))
        return
    except ValueError:
        found = None
    if found != about:
        raise UsageError(
            f"{out_dir} holds an export of something else: {found}, not {about}", remedy="Name another with --out."
        )


class _Export:
    def __init__(
        self, manifest: Manifest, journal: JournalReader, output: Output, tell: Callable[[int, int, int], None]
    ) -> None:
        self._manifest, self._journal, self._output, self._tell = manifest, journal, output, tell
        self._source = Path(manifest.out_dir)
        self._done: dict[int, Entry] = {}
        self.report = Exported()

    def entries(self) -> Iterator[Entry]:
        """All files of the export, ascending."""
        return (self._done[row] for row in sorted(self._done))

    def run(self, record: BinaryIO) -> None:
        sources = {r["row"]: r["source_xxh3"] for r in self._journal.all_rows() if State(r["state"]) is State.VERIFIED}
        rows = list(sources)
        self._read_record(record, sources)
        self.report.before = len(self._done)
        todo = iter([row for row in rows if row not in self._done])
        under_way: dict[Future[Written], dict[str, Any]] = {}
        told = 0.0
        with ThreadPoolExecutor(THREADS, thread_name_prefix="export") as pool:
            try:
                while True:
                    while len(under_way) < 2 * THREADS and (number := next(todo, None)) is not None:
                        self._submit(pool, under_way, number)
                    if not under_way:
                        break
                    for future in wait(under_way, timeout=_TELL_EVERY, return_when=FIRST_COMPLETED).done:
                        self._end(record, future, under_way.pop(future))
                    if time.monotonic() - told > _TELL_EVERY:
                        told = time.monotonic()
                        self._tell(len(self._done), len(rows), self.report.nbytes)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        self._tell(len(self._done), len(rows), self.report.nbytes)

    def _submit(self, pool: ThreadPoolExecutor, under_way: dict[Future[Written], dict[str, Any]], number: int) -> None:
        (row,) = self._journal.rows_of([number])
        if not has_file(row):
            self.report.released += row.get("released_at") is not None
            return
        sample = sample_of(self._journal, row, self._manifest)
        under_way[pool.submit(self._convert, row, sample)] = row

    def _convert(self, row: dict[str, Any], sample: OutputSample) -> Written:
        """Read one file, hold it against the journal, write it in the new format, read that back.

        Raises:
            ForeignError, DumpRejectedError, DamageError: the source, or what came of it, is not what it must be.
        """
        found = read_foreign(self._source / row["output_path"])
        if found.input_ids.tolist() != list(sample.input_ids):
            raise DamageError(Damage.WRONG_CONTENT, f"{row['output_path']} holds other token ids than the journal")
        with as_dump(found, sample.rid, sample.capture_layers, sample.final_norm) as dump:
            written = self._output.write(dump, sample, _ignore)
        if written.source_xxh3 != row["source_xxh3"]:
            self._output.set_aside(written.path)
            raise DamageError(Damage.WRONG_TENSOR, f"the states in {row['output_path']} are not those captured")
        self._output.verify(sample, written, _ignore)
        return written

    def _end(self, record: BinaryIO, future: Future[Written], row: dict[str, Any]) -> None:
        try:
            written = future.result()
        except (ForeignError, DumpRejectedError, DamageError) as error:
            (now,) = self._journal.rows_of([row["row"]])
            if has_file(now):
                self.report.damaged.append(Damaged(row["row"], row["sample_id"], str(error)))
            else:  # released, or repaired, meanwhile
                self.report.released += now.get("released_at") is not None
            return
        entry = Entry(
            row=row["row"],
            id=row["sample_id"],
            file=written.path,
            tokens=row["num_tokens"],
            loss_tokens=row["loss_tokens"],
            bytes=written.nbytes,
            xxh3_128=written.output_xxh3,
        )
        record.write(json.dumps([asdict(entry), written.source_xxh3]).encode() + b"\n")
        record.flush()
        self._done[entry.row] = entry
        self.report.written += 1
        self.report.nbytes += entry.bytes

    def _read_record(self, record: BinaryIO, sources: dict[int, str]) -> None:
        """What earlier calls made, if it is still there and the row's states are still the same."""
        record.seek(0)
        lines = record.read().split(b"\n")
        if lines[-1]:
            record.write(b"\n")  # a kill has cut the last one short
        for line in lines:
            try:
                values, source = json.loads(line)
                entry = Entry(**values)
                size = os.stat(self._output.folder / entry.file, follow_symlinks=False).st_size
            except (ValueError, TypeError, FileNotFoundError):
                continue
            if size == entry.bytes and sources.get(entry.row) == source:
                self._done[entry.row] = entry


def _ignore(_phase: str, _nbytes: int) -> None:
    """Nobody watches one file."""
