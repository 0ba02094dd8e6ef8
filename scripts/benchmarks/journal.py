"""Bar 6: transitions per second at synchronous=FULL; resume, status and claims on a large journal."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from bars import Bar, medians, say, work_folder

from hsjournal.config import Manifest, RunPaths
from hsjournal.journal.group import JournalThread
from hsjournal.journal.migrate import migrate
from hsjournal.journal.pragmas import connect
from hsjournal.journal.store import Journal, Move, NewRow
from hsjournal.states import Actor, State, Transition

RUN = "bench001"
SINGLE = 400  # transitions one by one, a round
ROWS_AT_ONCE = 256
BATCHED_ROWS = 5_000  # each through four transitions, a round
CLAIMS = 1_000  # a round
FILE = {
    "output_path": "rows_0-2000/data_0.ckpt",
    "output_bytes": 1 << 20,
    "output_xxh3": "0" * 32,
    "source_xxh3": "0" * 32,
}
IN_FLIGHT = 32


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of this benchmark."""
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the large journal [default: 1,000,000]")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each of its prompts [default: 32]")


def run(options: argparse.Namespace) -> list[Bar]:
    """All figures of bar 6, on the disk under ``--folder``."""
    with work_folder(options.folder, on_disk=True) as folder:
        small = _Small(folder / "small")
        large = _Large(folder / "large", options.rows, options.tokens)
        found = medians(
            {
                "transitions_single": small.single,
                "transitions_batched": small.batched,
                "resume_s": large.resume,
                "resume_journal_s": large.resume_journal,
                "status_s": large.status,
                "claim_p99_ms": large.claim_p99,
            },
            options.rounds,
            say,
        )
        size = (large.paths.journal).stat().st_size / 1e6
    rows = f"{options.rows:,} rows, {size:,.0f} MB"
    return [
        Bar("transitions_single", found["transitions_single"], 300, "higher", "one a commit, synchronous=FULL"),
        Bar(
            "transitions_batched",
            found["transitions_batched"],
            10_000,
            "higher",
            f"{ROWS_AT_ONCE} rows at once, group commit",
        ),
        Bar(
            "resume_s", found["resume_s"], 1, "lower", f"worker's process, imports included, to its first claim; {rows}"
        ),
        Bar("resume_journal_s", found["resume_journal_s"], None, "lower", "of that: open, gather, counts, claim"),
        Bar("status_s", found["status_s"], 0.5, "lower", "the whole process of `hsjournal status`"),
        Bar("claim_p99_ms", found["claim_p99_ms"], 10, "lower", "find the next row and commit that it is sent"),
    ]


def make_run(folder: Path, rows: int, tokens: int) -> tuple[RunPaths, int]:
    """A run directory with pending rows; returns its epoch."""
    paths = RunPaths.of(folder)
    folder.mkdir(parents=True)
    migrate(paths.journal)
    with Journal(paths.journal) as journal:
        journal.start_ingest(RUN)
        begin = time.monotonic()
        for start in range(0, rows, 20_000):
            journal.add_rows([_row(number, tokens) for number in range(start, min(start + 20_000, rows))])
        if rows > 100_000:
            say(f"{rows:,} rows entered in {time.monotonic() - begin:.1f} s")
        journal.finish_ingest()
        return paths, journal.raise_epoch()


def _row(number: int, tokens: int) -> NewRow:
    ids = array("I", range(number % 1000, number % 1000 + tokens))
    return NewRow(number, f"sample-{number:09d}", "prompts.jsonl", number + 1, ids, [tokens // 2, tokens - tokens // 2])


class _Small:
    """A journal for counting transitions; a fresh block of rows for every round."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, 0

    def single(self) -> float:
        """Transitions per second, each committed before the next is handed in."""
        return asyncio.run(self._measure(SINGLE // 4, at_once=1))

    def batched(self) -> float:
        """Transitions per second with many rows under way, as in a worker."""
        return asyncio.run(self._measure(BATCHED_ROWS, at_once=ROWS_AT_ONCE))

    async def _measure(self, rows: int, at_once: int) -> float:
        self._made += 1
        paths, epoch = make_run(self._folder / str(self._made), rows, 8)
        thread = JournalThread(paths.journal, epoch, pause_limit=60, retry_pause=1)
        await thread.start()
        numbers: Iterator[int] = iter(range(rows))

        async def work() -> None:
            for row in numbers:
                for at, move in _forward(row):
                    await thread.apply(Move(row, at, *move))

        begin = time.monotonic()
        await asyncio.gather(*(work() for _ in range(at_once)))
        seconds = time.monotonic() - begin
        verified = await thread.call(lambda journal: journal.counts()[State.VERIFIED].rows)
        await thread.stop()
        assert verified == rows
        return 4 * rows / seconds


def _forward(row: int) -> list[tuple[int, tuple[Transition, dict[str, object]]]]:
    """The four steps of a row, with the columns that a worker sets."""
    now = time.time()
    sent = {"attempt": 1, "sent_at": now, "server": "http://127.0.0.1:30000", "boot_id": "b" * 32, "reason": None}
    return [
        (0, (Transition(State.PENDING, State.SENT, Actor.WORKER, ""), sent)),
        (1, (Transition(State.SENT, State.DUMPED, Actor.WORKER, ""), {"boot_id": "b" * 32})),
        (1, (Transition(State.DUMPED, State.WRITTEN, Actor.WORKER, ""), FILE | {"output_path": f"data_{row}.ckpt"})),
        (
            1,
            (
                Transition(State.WRITTEN, State.VERIFIED, Actor.WORKER, ""),
                {"verify_method": "direct", "verified_at": now, "suspect": 0},
            ),
        ),
    ]


class _Large:
    """A run that was stopped half-way: half its rows verified, some in flight, the rest pending."""

    def __init__(self, folder: Path, rows: int, tokens: int) -> None:
        self.paths, self._epoch = make_run(folder, rows, tokens)
        self._rows, self._first = rows, rows // 2 + IN_FLIGHT
        begin = time.monotonic()
        with closing(connect(self.paths.journal)) as raw:
            raw.execute("BEGIN IMMEDIATE")
            half = {"half": rows // 2}
            raw.execute(
                "UPDATE sample SET state = 'written', actor = 'adopt', output_path = 'f', output_bytes = 100, "
                "output_xxh3 = 'x', attempt = 1, epoch = 1 WHERE row < :half",
                half,
            )
            raw.execute("UPDATE sample SET state = 'verified', verify_method = 'direct' WHERE row < :half", half)
            raw.execute("COMMIT")
        say(f"{rows // 2:,} rows moved to verified in {time.monotonic() - begin:.1f} s")
        with Journal(self.paths.journal) as journal:
            sent = Transition(State.PENDING, State.SENT, Actor.WORKER, "")
            moves = [Move(rows // 2 + n, 0, sent, {"attempt": 1}) for n in range(IN_FLIGHT)]
            journal.apply(moves, self._epoch)
        self.paths.manifest.write_text(manifest().to_toml())
        (folder / "root").mkdir()

    def resume(self) -> float:
        """Seconds of a worker's process from its start to its first claim, all that it imports included."""
        return self._child()["process_s"]

    def resume_journal(self) -> float:
        """Seconds of it that the journal and the reconciliation take."""
        return self._child()["journal_s"]

    def status(self) -> float:
        """Seconds of the whole process, as a user waits for it."""
        command = [str(Path(sys.executable).parent / "hsjournal"), "status", str(self.paths.run_dir), "--json"]
        begin = time.monotonic()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds = time.monotonic() - begin
        told = json.loads(done.stdout)
        assert (told["rows"], told["source"]) == (self._rows, "journal")
        return seconds

    def claim_p99(self) -> float:
        """Milliseconds to find the next pending row with its prompt, and to commit that it is sent."""
        sent = Transition(State.PENDING, State.SENT, Actor.WORKER, "")
        taken, cursor = [], self._first - 1
        with Journal(self.paths.journal) as journal:
            for _ in range(min(CLAIMS, self._rows // 4)):
                begin = time.monotonic()
                (claim,) = journal.claimable(cursor, 1)
                journal.apply([Move(claim.row, claim.attempt, sent, {"attempt": claim.attempt + 1})], self._epoch)
                taken.append(time.monotonic() - begin)
                cursor = claim.row
            # Back to pending: a resume finds few rows in flight, not all that were ever measured.
            back = Transition(State.SENT, State.PENDING, Actor.RECONCILE, "")
            rows = journal.rows_in(State.SENT, after=self._first - 1)
            journal.apply([Move(r["row"], r["attempt"], back) for r in rows], self._epoch)
        return 1000 * statistics.quantiles(taken, n=100)[98]

    def _child(self) -> dict[str, float]:
        script = Path(__file__).with_name("resume_child.py")
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(script), str(self.paths.run_dir), str(self._epoch)],
            check=True,
            capture_output=True,
            text=True,
        )
        told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return {"process_s": told["at"] - begin, "journal_s": told["journal_s"]}


def manifest() -> Manifest:
    """Of a run that never was."""
    return Manifest(
        run_id=RUN, created="", version="", model="m", model_sha256="", tokenizer_sha256="", hidden_size=64, num_layers=8,
        vocab_size=2000, context_length=4096, capture_layers=(1, 3, 5), dtype="bfloat16", final_norm="post",
        format="specforge", out_dir="/nowhere", engine="embedded", chunk_size=0,
    )  # fmt: skip
