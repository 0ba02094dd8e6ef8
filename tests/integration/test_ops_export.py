"""`export` and `index`: every row once, whole, equal in all formats; gone on with after a kill; damage is left out."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hsjournal.catalogue.vocabulary import choose
from hsjournal.config import Manifest
from hsjournal.errors import ExitCode, UsageError
from hsjournal.journal.store import Journal
from hsjournal.ops.export import RECORD, export
from hsjournal.ops.foreign import read_foreign
from hsjournal.ops.planes import digests
from hsjournal.ops.release import Named, release
from hsjournal.sink.formats import LAYOUTS
from hsjournal.states import State
from tests.helpers.cli import REPOSITORY, hsjournal
from tests.helpers.runs import MadeRun, make_run, mask_of

FROM_POST = [name for name, layout in LAYOUTS.items() if layout.final_norm != "pre"]
NORM_FREE = [name for name, layout in LAYOUTS.items() if layout.final_norm is None and not layout.drops_final]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return loaded


@pytest.mark.parametrize("name", FROM_POST)
def test_every_format_holds_the_same_states(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, [State.VERIFIED, State.PENDING, State.VERIFIED, State.SKIPPED])
    done = export(run.paths, name, tmp_path / "new")
    assert (done.written, done.before, done.damaged, done.exit_code) == (2, 0, [], ExitCode.DONE)
    index = lines_of(tmp_path / "new")
    assert [(e["row"], e["id"]) for e in index] == [(0, "sample 0"), (2, "sample 2")]
    for entry in index:
        path = tmp_path / "new" / entry["file"]
        assert path.stat().st_size == entry["bytes"]
        assert entry["tokens"] == len(run.ids[entry["row"]])
        data = load(path)
        if LAYOUTS[name].drops_final:
            old = torch.load(run.outputs()[entry["row"]], weights_only=True)
            assert torch.equal(data["hidden_states"].view(torch.int16), old["aux_hidden_state"].view(torch.int16))
        else:
            assert digests(read_foreign(path)) == run.row(entry["row"])["source_xxh3"]
    again = export(run.paths, name, tmp_path / "new")
    assert (again.written, again.before) == (0, 2)


def test_back_and_forth_gives_the_same_bytes(tmp_path: Path) -> None:
    """From a run in one format to others, and SpecForge's own again: nothing of a file depends on the way it came."""
    run = make_run(tmp_path, [State.VERIFIED] * 3)
    export(run.paths, "specforge", tmp_path / "again")
    for path in run.outputs().values():
        assert (tmp_path / "again" / path.relative_to(run.out)).read_bytes() == path.read_bytes()


def test_what_is_new_is_added_and_what_was_repaired_is_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED, State.WRITTEN])
    out = tmp_path / "new"
    assert export(run.paths, "safetensors", out).written == 1
    from hsjournal.journal.store import Move
    from hsjournal.states import Actor, Transition

    with Journal(run.paths.journal) as journal:
        move = Transition(State.WRITTEN, State.VERIFIED, Actor.WORKER, "")
        journal.apply([Move(1, 1, move, {"verify_method": "direct"})], journal.epoch)
    added = export(run.paths, "safetensors", out)
    assert (added.written, added.before) == (1, 1)
    (out / lines_of(out)[0]["file"]).unlink()
    assert export(run.paths, "safetensors", out).written == 1
    release(run.paths, [Named(row=0)])
    kept = export(run.paths, "safetensors", out)
    assert (kept.written, kept.before, kept.released) == (0, 2, 0)
    fresh = export(run.paths, "modelopt", tmp_path / "other")
    assert (fresh.written, fresh.released) == (1, 1)


def test_damage_is_left_out_and_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 4)
    files = run.outputs()
    data = bytearray(files[1].read_bytes())
    data[len(data) // 2] ^= 1  # inside the states: torch reads it without complaint
    files[1].write_bytes(data)
    files[2].unlink()
    done = export(run.paths, "modelopt", tmp_path / "new")
    assert sorted(d.row for d in done.damaged) == [1, 2]
    assert done.exit_code is ExitCode.FAILED_SAMPLES
    assert [e["row"] for e in lines_of(tmp_path / "new")] == [0, 3]
    assert len(list((tmp_path / "new").glob("*.pt"))) == 2


@pytest.mark.parametrize("point", ["sink.written", "sink.linked", "sink.published", "verify.done"])
def test_killed_anywhere_the_same_call_goes_on(tmp_path: Path, point: str) -> None:
    run = make_run(tmp_path, [State.VERIFIED] * 8)
    out = tmp_path / "new"
    command = [
        sys.executable,
        "-m",
        "hsjournal.cli.main",
        "export",
        str(run.paths.run_dir),
        "--format",
        "torchspec",
        "--out",
        str(out),
    ]
    environment = os.environ | {"HSJOURNAL_FAULTS": f"{point}=kill@5"}
    killed = subprocess.run(command, env=environment, check=False, cwd=REPOSITORY, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    with (out / RECORD).open("ab") as record:  # as a kill in the middle of a line leaves it
        record.write(b'[{"row": 7, "id"')
    done = export(run.paths, "torchspec", out)
    assert done.written + done.before == 8
    assert not done.damaged
    assert len(list(out.rglob("*.pt"))) == 8
    assert len(lines_of(out)) == 8
    assert export(run.paths, "torchspec", out).before == 8
    manifest = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert {entry["data_id"] for entry in manifest} == {f"sample {row}" for row in range(8)}
    for entry in manifest:
        assert torch.load(out / entry["file"], weights_only=True)["data_id"] == entry["data_id"]
    assert json.loads((out / "dataset.json").read_text()) == {"version": 1, "last_hidden_states_prenorm": False}


def test_refusals(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED])
    with pytest.raises(UsageError, match="before the model's last norm"):
        export(run.paths, "speculators", tmp_path / "new")
    with pytest.raises(UsageError, match="no output format"):
        export(run.paths, "nothing", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        export(run.paths, "modelopt", tmp_path / "used")
    export(run.paths, "modelopt", tmp_path / "new")
    with pytest.raises(UsageError, match="something else"):
        export(run.paths, "torchspec", tmp_path / "new")
    as_if = Manifest.load(run.paths.manifest)
    from dataclasses import replace

    run.paths.manifest.write_text(replace(as_if, format="specforge-dflash").to_toml())
    with pytest.raises(UsageError, match="hold no final state"):
        export(run.paths, "modelopt", tmp_path / "third")


def test_the_commands(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED, State.VERIFIED, State.PENDING])
    told = hsjournal("export", run.paths.run_dir, "--format", "angelslim", "--out", tmp_path / "new")
    assert (told.code, "2 files written" in told.out) == (0, True), told
    made = hsjournal("index", run.paths.run_dir, "--parquet", "--draft-vocab-size", "100", "--json")
    assert made.code == 0, made
    assert made.json()["samples"] == 2
    import pyarrow.parquet as pq

    assert pq.read_table(run.paths.run_dir / "index.parquet").to_pylist() == lines_of(run.paths.run_dir)
    mapping = torch.load(run.paths.run_dir / "vocab_mapping" / "vocab_mapping.pt", weights_only=True)
    check_mapping(run, mapping, 100)
    for name in ("d2t", "t2d"):
        assert np.array_equal(np.load(run.paths.run_dir / "vocab_mapping" / f"{name}.npy"), mapping[name].numpy())
    assert "cover" in hsjournal("index", run.paths.run_dir, "--draft-vocab-size", "100").out
    assert hsjournal("index", run.paths.run_dir, "--draft-vocab-size", "32001").code == 2


def check_mapping(run: MadeRun, mapping: dict[str, Any], size: int) -> None:
    counts = np.zeros(32_000, dtype=int)
    for ids in run.ids.values():  # the pending row counts too
        zeros, _ = mask_of(len(ids))
        np.add.at(counts, np.asarray(ids[zeros:]), 1)
    d2t, t2d = mapping["d2t"], mapping["t2d"]
    assert (d2t.dtype, t2d.dtype, d2t.shape, t2d.shape) == (torch.int64, torch.bool, (size,), (32_000,))
    chosen = (d2t + torch.arange(size)).tolist()
    assert chosen == sorted(set(chosen)) == t2d.nonzero().flatten().tolist()
    assert min(counts[chosen]) >= np.delete(counts, chosen).max()
    assert set(np.flatnonzero(counts)) <= set(chosen) or min(counts[chosen]) > 0


def test_the_most_frequent_are_chosen_and_of_equals_the_lower() -> None:
    counts = np.array([0, 5, 2, 2, 9, 2, 0, 0])
    mapping = choose(counts, 4)
    assert (mapping.d2t + np.arange(4)).tolist() == [1, 2, 3, 4]
    assert mapping.coverage == 18 / 20
    assert (choose(counts, 7).d2t + np.arange(7)).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert choose(np.zeros(3, dtype=int), 2).coverage == 1.0
    for wrong in (0, 9):
        with pytest.raises(UsageError, match="draft vocabulary"):
            choose(counts, wrong)


def test_readers_never_see_half_an_index(tmp_path: Path) -> None:
    """While it is written anew again and again, every look finds whole lines and all of them."""
    import threading

    run = make_run(tmp_path, [State.VERIFIED] * 40, tokens=[3] * 40)
    from hsjournal.ops.index import write

    write(run.paths)
    stop = threading.Event()
    looks: list[int] = []

    def look() -> None:
        while not stop.is_set():
            looks.append(len(lines_of(run.paths.run_dir)))

    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(20):
        write(run.paths)
    stop.set()
    reader.join()
    assert set(looks) == {40}
    with closing(Journal(run.paths.journal)):
        assert random.Random(0).sample(looks, 1) == [40]
    assert not [p for p in run.paths.run_dir.iterdir() if p.name.startswith(".hsjournal")]
