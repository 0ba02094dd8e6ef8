"""Shards of a run: each row is in exactly one, under the number and with the content that it has in the whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsjournal.errors import PromptsError
from hsjournal.journal.store import NewRow
from hsjournal.prompts.ingest import ingest
from hsjournal.prompts.shards import Shard, shard_of
from hsjournal.prompts.spec import IngestSpec, Reading


class Kept:
    """A journal's place taken by a list."""

    def __init__(self) -> None:
        self.rows: list[NewRow] = []

    def start_ingest(self, run_id: str) -> None:
        self.rows = []

    def add_rows(self, rows: Sequence[NewRow]) -> None:
        self.rows += rows

    def finish_ingest(self, found: str | None = None) -> None: ...


def taken(files: Sequence[Path], **reading: object) -> list[NewRow]:
    kept = Kept()
    ingest(kept, IngestSpec("run", tuple(map(str, files)), None, 4096, reading=Reading(**reading)))  # type: ignore[arg-type]
    return kept.rows


def line(draw: int) -> str:
    kinds: list[object] = [
        {"id": f"sample {draw}", "input_ids": [draw % 50] * (1 + draw % 9), "loss_mask": [1] * (1 + draw % 9)},
        {"input_ids": [draw % 50], "loss_mask": [1]},
        {"id": "stands often", "input_ids": [draw % 50], "loss_mask": [1]},
        {"id": "☃" * (draw % 5), "text": 17},
    ]
    return "{broken" if draw % 5 == 4 else json.dumps(kinds[draw % 4])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=60),
    st.integers(1, 5),
    st.sampled_from([None, 3, 20]),
    st.sampled_from([None, 7]),
)
def test_the_union_is_the_whole(
    tmp_path_factory: pytest.TempPathFactory, draws: list[int], of: int, limit: int | None, seed: int | None
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    files = [folder / "a.jsonl", folder / "b.jsonl"]
    good = {"id": "good", "input_ids": [1], "loss_mask": [1]}
    files[0].write_text("\n".join([json.dumps(good), *map(line, draws[::2])]) + "\n")
    files[1].write_text("\n".join([json.dumps(good | {"id": "too"}), *map(line, draws[1::2])]) + "\n")
    try:
        whole = taken(files, limit=limit, shuffle_seed=seed)
    except PromptsError:  # a limit that leaves only refused lines
        return
    parts: list[NewRow] = []
    for number in range(1, of + 1):
        try:
            parts += taken(files, limit=limit, shuffle_seed=seed, shard=f"{number}/{of}")
        except PromptsError:  # none of its own, or only refused ones
            parts += [row for row in whole if row.skipped and _shard(row, of) == number]
    assert sorted(parts, key=lambda row: row.row) == sorted(whole, key=lambda row: row.row)


def _shard(row: NewRow, of: int) -> int:
    own = not row.sample_id.startswith(f"{row.source}:")
    return shard_of(row.sample_id if own else f"line {row.line}", of)


def test_the_hash_is_for_ever() -> None:
    """Other values would move rows between shards of runs that have begun."""
    assert [shard_of(f"sample {n}", 1000) for n in range(6)] == FOR_EVER
    sizes = [sum(shard_of(f"sample {n}", 8) == shard for n in range(8000)) for shard in range(1, 9)]
    assert min(sizes) > 880
    assert max(sizes) < 1120


FOR_EVER = [65, 664, 808, 583, 956, 533]


@pytest.mark.parametrize("text", ["", "0/4", "5/4", "1", "1/0", "a/b", "1/4/2", "-1/4", "1/1000000", " 1/4"])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(PromptsError, match="--shard 2/8"):
        Shard.parse(text)
    if text:
        with pytest.raises(PromptsError, match="--shard 2/8"):
            Reading(shard=text).frozen()
