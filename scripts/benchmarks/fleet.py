"""What 64 nodes cost: status and merge over 64 real journals, and the time that lost nodes take, by a seeded simulation."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from bars import Bar, medians, say, work_folder
from journal import RUN, manifest

from hsjournal.config import RunPaths
from hsjournal.fleet.badge import Badge
from hsjournal.fleet.look import shard_name
from hsjournal.fleet.merge import merge
from hsjournal.fleet.survey import survey
from hsjournal.journal.migrate import migrate
from hsjournal.journal.store import Journal, Move, NewRow
from hsjournal.prompts.shards import shard_of
from hsjournal.states import Actor, State, Transition

STEPS = (State.PENDING, State.SENT, State.DUMPED, State.WRITTEN, State.VERIFIED)
HOURS, TERABYTES = 9.5, 5.03
"""Of a shard on its node: the incident's job, 37,312 samples at 1.09 a second."""
BETWEEN_FAILURES = 6_000.0
"""Hours of one node between two failures: 419 in 54 days of 2,048 nodes is what Llama 3's training reported."""
START = 0.3
"""Hours until a shard runs again elsewhere: half a minute to notice, the rest for the server to load its weights."""
ADOPTED = 0.7
"""GB/s at which finished files are read and taken over: one client's measured rate of verifying."""
SEED, DRAWS = 7, 2_000


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much."""
    parser.add_argument("--nodes", type=int, default=64, help="shards [default: 64]")
    parser.add_argument("--rows", type=int, default=37_312, help="of the whole [default: 37,312]")


def run(options: argparse.Namespace) -> list[Bar]:
    """Status and merge measured; the rest drawn."""
    with work_folder(options.folder, on_disk=True) as folder:
        begin = time.monotonic()
        for number in range(1, options.nodes + 1):
            _shard(folder, number, options.nodes, options.rows)
        say(f"{options.nodes} run directories with {options.rows:,} rows made in {time.monotonic() - begin:.0f} s")
        found = medians(
            {
                "fleet_status_s": lambda: _status(folder, options.rows),
                "fleet_merge_s": lambda: _merge(folder, options.rows),
            },
            options.rounds,
            say,
        )
    note = f"{options.nodes} shards, {options.rows:,} rows"
    bars = [Bar(name, value, None, "lower", note) for name, value in found.items()]
    for shared in (False, True):
        lost, failures, end = simulated(options.nodes, shared=shared)
        kept = "outputs shared and taken over" if shared else "outputs lost with the node"
        bars.append(
            Bar(
                f"fleet_lost_{'shared' if shared else 'private'}_h",
                lost,
                None,
                "lower",
                f"node hours a failure; {kept}",
            )
        )
        say(
            f"{kept}: {failures:.2f} failures a job, {lost:.2f} node hours lost a failure, the job ends after {end:.2f} h, not {HOURS} h"
        )
    return bars


def simulated(nodes: int, *, shared: bool) -> tuple[float, float, float]:
    """Node hours lost a failure, failures a job, hours to the last shard's end: means of many jobs drawn from one seed."""
    draw = random.Random(SEED)  # noqa: S311 - drawn, not hidden
    lost, ends, failures = 0.0, [], 0
    for _ in range(DRAWS):
        shards = []
        for _ in range(nodes):
            elapsed, done = 0.0, 0.0
            while (good := draw.expovariate(1 / BETWEEN_FAILURES)) < HOURS - done:
                failures += 1
                elapsed += good + START
                before = done + good
                if shared:
                    taking_over = before / HOURS * TERABYTES * 1000 / ADOPTED / 3600
                    elapsed += taking_over
                    lost += START + taking_over
                    done = before
                else:
                    lost += START + before
                    done = 0.0
            shards.append(elapsed + HOURS - done)
        ends.append(max(shards))
    return lost / failures, failures / DRAWS, statistics.mean(ends)


def _shard(base: Path, number: int, of: int, rows: int) -> None:
    """A finished run directory: its journal is real, its files have their sizes and nothing in them."""
    shard = f"{number}/{of}"
    paths = RunPaths.of(base / "runs" / shard_name(shard))
    out = paths.default_out
    out.mkdir(parents=True)
    made = replace(manifest(), out_dir=str(out), options={"prompts.shard": shard, "handover_root": ""})
    paths.manifest.write_text(made.to_toml())
    Badge("f", shard, 1, f"node{number}").write(paths.run_dir)
    migrate(paths.journal)
    mine = [row for row in range(rows) if shard_of(f"s{row}", of) == number]
    with Journal(paths.journal) as journal:
        journal.start_ingest(RUN)
        journal.add_rows([NewRow(row, f"s{row}", "p", row + 1, array("I", [1] * 8), [4, 4], None) for row in mine])
        journal.finish_ingest()
        epoch = journal.raise_epoch()
        for source, target in pairwise(STEPS):
            step = Transition(source, target, Actor.WORKER, "")
            journal.apply(
                [Move(row, int(source is not State.PENDING), step, _values(row, target)) for row in mine], epoch
            )
    for row in mine:
        with (out / f"{row}.ckpt").open("wb") as file:
            file.truncate(1000)


def _values(row: int, target: State) -> dict[str, object]:
    if target is State.SENT:
        return {"attempt": 1}
    if target is State.WRITTEN:
        return {"output_path": f"{row}.ckpt", "output_bytes": 1000, "output_xxh3": "0" * 32, "source_xxh3": "0" * 32}
    return {"verify_method": "direct", "verified_at": 0.0} if target is State.VERIFIED else {}


def _status(folder: Path, rows: int) -> float:
    begin = time.monotonic()
    found = survey([folder / "runs"])
    assert found["complete"]
    assert found["counts"]["verified"] == rows
    return time.monotonic() - begin


def _merge(folder: Path, rows: int) -> float:
    begin = time.monotonic()
    assert merge([folder / "runs"], folder / "index.jsonl").samples == rows
    return time.monotonic() - begin
