"""Read every output back and name each damage; on demand, put the damaged rows back on the list of what is to be done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any

from hsjournal.catalogue.beside import NAMES
from hsjournal.config import Manifest, RunPaths
from hsjournal.errors import HsjournalError
from hsjournal.journal.fence import Fence
from hsjournal.journal.locks import is_held
from hsjournal.journal.reading import JournalReader, Reading
from hsjournal.ops.custody import custody, need_output
from hsjournal.ops.repair import Completion, Repair
from hsjournal.ops.strangers import Strangers, find_strangers
from hsjournal.ops.subset import Subset
from hsjournal.ops.verify_report import Damaged, Progress, Report, Unchecked, has_file
from hsjournal.sink.formats import layout_named
from hsjournal.sink.output import Output
from hsjournal.sink.verify import DamageError
from hsjournal.states import INCOMPLETE, State
from hsjournal.worker.recover import sample_of, written_of

THREADS = 4
_TELL_EVERY = 0.2
_LOOKS = 3
"""Under a live run a row may move while its file is being read: then it is looked at again."""


def verify(
    paths: RunPaths,
    subset: Subset,
    *,
    seed: int,
    repair: bool = False,
    tell: Callable[[Progress], None] = lambda _progress: None,
) -> Report:
    """Check the outputs of a run; a live run is not disturbed.

    Without ``repair`` one thing is changed, if the run is not going on: rows whose read-back was put off are verified when
    their files prove sound.

    Args:
        paths: of the run.
        subset: which rows.
        seed: of the draw, for a subset by share or size.
        repair: set damaged files aside and put their rows back to pending.
        tell: called now and then.

    Raises:
        NoJournalError: when there is no run.
        JournalLockedError: with ``repair``, when the run is going on.
        HsjournalError: when the output folder is not there.
    """
    manifest = Manifest.load(paths.manifest)
    for folder in manifest.out_dirs:
        need_output(Path(folder))
    live = is_held(paths.supervisor_lock) or is_held(paths.worker_lock)
    if not repair and (live or not _put_off(paths)):
        with JournalReader(paths.journal) as reader, closing(Output(manifest, paths.rejects)) as output:
            return _Check(manifest, reader, output, Report(seed, live), tell).run(subset)
    with custody(paths) as held:
        fence = Fence(paths.journal, epoch := held.take_epoch("verify --repair" if repair else "verify"))
        with closing(Output(manifest, paths.rejects, fence)) as output:
            mend = Repair(held, epoch, output).mend if repair else None
            complete = Completion(held.journal, epoch).complete
            return _Check(manifest, held.journal, output, Report(seed), tell, mend, complete).run(subset)


def _put_off(paths: RunPaths) -> bool:
    with JournalReader(paths.journal) as reader:
        return reader.deferred().rows > 0


class _Check:
    def __init__(
        self,
        manifest: Manifest,
        journal: Reading,
        output: Output,
        report: Report,
        tell: Callable[[Progress], None],
        mend: Callable[[dict[str, Any], DamageError], bool] | None = None,
        complete: Callable[[dict[str, Any], str], bool] = lambda _row, _method: False,
    ) -> None:
        self._complete = complete
        self._manifest, self._journal, self._output = manifest, journal, output
        self._report, self._tell, self._mend = report, tell, mend
        self._totals = (0, 0)
        self._told = 0.0

    def run(self, subset: Subset) -> Report:
        began = time.monotonic()
        sizes = {r["row"]: r["output_bytes"] for r in self._journal.all_rows() if has_file(r)}
        chosen = subset.choose(sizes.items(), self._report.seed)
        self._totals = (len(chosen), sum(sizes[row] for row in chosen))
        with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as pool:
            try:
                self._read(chosen, pool)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self._report.strangers = self._strangers()
        self._report.damaged.sort(key=lambda d: d.row)
        self._report.seconds = time.monotonic() - began
        return self._report

    def _read(self, chosen: Sequence[int], pool: ThreadPoolExecutor) -> None:
        """Keep a few files under way; verdicts are drawn here, on one thread."""
        todo = iter(chosen)
        under_way: dict[Future[str], dict[str, Any]] = {}
        while True:
            for row in _take(todo, 2 * THREADS - len(under_way)):
                self._submit(pool, under_way, row)
            if not under_way:
                self._say(finished=True)
                return
            done, _ = wait(under_way, timeout=_TELL_EVERY, return_when=FIRST_COMPLETED)
            for future in done:
                self._judge(future, under_way.pop(future))
            self._say()

    def _submit(self, pool: ThreadPoolExecutor, under_way: dict[Future[str], dict[str, Any]], row: int) -> None:
        (now,) = self._journal.rows_of([row])
        if not has_file(now):
            return  # a live run has moved it on, or it was released
        sample, written = sample_of(self._journal, now, self._manifest), written_of(now)
        future = pool.submit(lambda: str(self._output.verify(sample, written, lambda _phase, _nbytes: None)))
        under_way[future] = now

    def _judge(self, future: Future[str], row: dict[str, Any]) -> None:
        for _ in range(_LOOKS):
            try:
                method = future.result()
                self._report.methods[method] += 1
                self._report.checked += 1
                self._report.completed += self._complete(row, method)
            except DamageError as error:
                moved = self._moved(row)
                if moved is not None:
                    if not has_file(moved):
                        return
                    row, future = moved, self._again(moved)
                    continue
                self._report.checked += 1
                repaired = self._mend(row, error) if self._mend is not None else False
                path = row["output_path"]
                self._report.damaged.append(
                    Damaged(row["row"], row["sample_id"], path, error.kind.value, error.detail, repaired)
                )
            except OSError as error:
                need_output(self._output.folder_of(row["output_path"]))
                why = error.strerror or str(error)
                self._report.unchecked.append(Unchecked(row["row"], row["output_path"], why))
            self._report.nbytes += row["output_bytes"]
            return
        self._report.unchecked.append(Unchecked(row["row"], row["output_path"], "the live run keeps changing it"))

    def _moved(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The row as it is now, if that is another than ``row`` as far as its file goes."""
        (now,) = self._journal.rows_of([row["row"]])
        there = has_file(now)
        same = there and (now["attempt"], now["output_xxh3"]) == (row["attempt"], row["output_xxh3"])
        return None if same else now

    def _again(self, row: dict[str, Any]) -> Future[str]:
        future: Future[str] = Future()
        try:
            sample, written = sample_of(self._journal, row, self._manifest), written_of(row)
            future.set_result(str(self._output.verify(sample, written, lambda _phase, _nbytes: None)))
        except (HsjournalError, OSError) as error:
            future.set_exception(error)
        return future

    def _strangers(self) -> Strangers:
        """Files that no row owns; under a live run, what may be on its way is none of them."""
        layout, owned = layout_named(self._manifest.format), set(NAMES)
        for row in self._journal.all_rows():
            if has_file(row):
                owned.add(row["output_path"])
            elif self._report.live and State(row["state"]) in INCOMPLETE:
                owned.add(layout.path_of(row["row"], row["sample_id"]))
        found = find_strangers(self._output.folder, owned)
        for folder in self._output.folders[1:]:
            found = found.and_those_of(folder, find_strangers(folder, _inside(folder, owned)))
        if not self._report.live:
            return found
        kept = tuple(p for p in found.paths if not p.rsplit("/", 1)[-1].startswith(".hsjournal-"))
        return Strangers(kept, found.count - len(found.paths) + len(kept))

    def _say(self, *, finished: bool = False) -> None:
        now = time.monotonic()
        if finished or now - self._told >= _TELL_EVERY:
            self._told = now
            r, (rows, nbytes) = self._report, self._totals
            self._tell(Progress(r.checked + len(r.unchecked), rows, r.nbytes, nbytes, len(r.damaged)))


def _inside(folder: Path, owned: set[str]) -> set[str]:
    """Those of the paths that may lie in ``folder``, relative to it."""
    return {path.removeprefix(f"{folder}/") for path in owned}


def _take(rows: Iterator[int], most: int) -> Iterator[int]:
    for _ in range(most):
        row = next(rows, None)
        if row is None:
            return
        yield row
