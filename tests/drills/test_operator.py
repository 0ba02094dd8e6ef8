"""The operator's commands on a real run: a live tiny engine, real processes, and the engine's own log of what it got."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hsjournal.config import RunPaths
from hsjournal.dump.protocol import RequestId
from hsjournal.journal.store import Journal
from hsjournal.states import State
from tests.helpers.cli import Result, hsjournal, started
from tests.helpers.engine import Engine, running_engine
from tests.helpers.foreign import save, snapshot
from tests.helpers.reference import Reference, check_outputs, worst_row_error
from tests.helpers.tiny_models import make_tiny_model

LAYERS = [1, 3, 4]
ROWS = 12
HALF = (0, 1, 3, 4, 7, 10)


@dataclass(frozen=True)
class World:
    """A model, its reference, and a served copy of it."""

    model: Path
    reference: Reference
    engine: Engine

    def sent_rows(self) -> Counter[int]:
        """How often each row was sent to the engine so far, probes aside."""
        rids = [RequestId.parse(text) for text in self.engine.received_rids()]
        return Counter(rid.row for rid in rids if rid is not None and rid.row is not None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("operator")
    model = make_tiny_model("llama", folder / "model")
    broken = folder / "broken"
    faults = {"HSJOURNAL_FAULTS": f"capture.writing=errno:EIO,row:5,while:{broken}"}
    with running_engine(model, folder / "root", layers="1,3,4", environment=faults) as engine:
        yield World(model, Reference(model), engine)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Rows of token ids; rows 7 and 9 are the same prompt under two ids."""
    rng = random.Random(11)
    lines = []
    for row in range(ROWS):
        ids = [rng.randrange(3, 250) for _ in range(6 + 5 * row)]
        lines.append({"id": f"s{row}", "input_ids": ids, "loss_mask": [0] * 3 + [1] * (len(ids) - 3)})
    lines[9] |= {"input_ids": lines[7]["input_ids"], "loss_mask": lines[7]["loss_mask"]}
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def leave_half(
    world: World,
    prompts: Path,
    folder: Path,
    layers: Sequence[int] = LAYERS,
    numbers: Sequence[int] = range(len(HALF)),
) -> Path:
    """What a tool without a journal left: SpecForge's files of half the rows, numbered in its own way."""
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    for number, row in zip(numbers, HALF, strict=True):
        ids = torch.tensor(rows[row]["input_ids"])
        aux, final = world.reference.states(ids, list(layers))
        mask = torch.tensor(rows[row]["loss_mask"])
        content = {"input_ids": ids, "loss_mask": mask, "hidden_state": final[None], "aux_hidden_state": aux[None]}
        save(folder / "rows_0-2000" / f"data_{number}.ckpt", content)
    return folder


def new_run(world: World, run_dir: Path, prompts: Path) -> tuple[str | Path, ...]:
    root = world.engine.root
    served = ("--model", world.model, "--server", world.engine.url, "--handover-root", root)
    return (run_dir, "--prompts", prompts, *served)


def states_of(run_dir: Path) -> dict[int, str]:
    with Journal(RunPaths.of(run_dir).journal) as journal:
        return {r["row"]: r["state"] for state in State for r in journal.rows_in(state)}


def finish(run_dir: Path) -> Result:
    done = hsjournal("resume", run_dir, "--plain")
    assert done.code == 0, done
    return done


def test_what_is_already_there_is_not_computed_twice(world: World, prompts: Path, tmp_path: Path) -> None:
    sources = leave_half(world, prompts, tmp_path / "half")
    before, sent = snapshot(sources), world.sent_rows()
    run_dir = tmp_path / "run"
    done = hsjournal("adopt", *new_run(world, run_dir, prompts), "--outputs", sources, "--json")
    assert done.code == 0, done
    report = done.json()
    assert (report["adopted"], report["left"], report["how"]) == (6, 6, {"converted": 6})
    assert len(report["compared"]) == 3
    assert max(max(c["differences"]) for c in report["compared"]) < 1e-4
    assert {row for row, state in states_of(run_dir).items() if state == "verified"} == set(HALF)
    finish(run_dir)
    assert set(states_of(run_dir).values()) == {"verified"}
    now_sent = world.sent_rows() - sent
    assert now_sent == Counter({row: 1 for row in range(ROWS) if row not in HALF})
    assert snapshot(sources) == before
    found = check_outputs(run_dir / "out", world.reference)
    assert sorted(found) == list(range(ROWS))
    for number, row in enumerate(HALF):
        source = torch.load(sources / "rows_0-2000" / f"data_{number}.ckpt", weights_only=True)
        for key, tensor in source.items():
            assert torch.equal(found[row][key], tensor), (row, key)


def test_a_run_goes_on_where_a_killed_adoption_left_it(world: World, prompts: Path, tmp_path: Path) -> None:
    out = leave_half(world, prompts, tmp_path / "out", numbers=HALF)
    before, sent = snapshot(out), world.sent_rows()
    run_dir = tmp_path / "run"
    command = ("adopt", *new_run(world, run_dir, prompts), "--outputs", out, "--out", out)
    killed = hsjournal(*command, HSJOURNAL_FAULTS="verify.done=kill@3")
    assert killed.code == -9, killed
    entered = {row for row, state in states_of(run_dir).items() if state in ("written", "verified")}
    assert "written" in states_of(run_dir).values()
    assert entered <= set(HALF)
    finish(run_dir)
    assert world.sent_rows() - sent == Counter({row: 1 for row in range(ROWS) if row not in entered})
    after = snapshot(out)
    for row in entered:  # read back by the worker as they were found, and left as they were
        name = str(out / "rows_0-2000" / f"data_{row}.ckpt")
        assert after[name] == before[name]
    assert hsjournal("verify", run_dir).code == 0


def test_adopted_in_place_by_an_engine_of_its_own_after_a_kill(world: World, prompts: Path, tmp_path: Path) -> None:
    out = leave_half(world, prompts, tmp_path / "out", numbers=HALF)
    before = snapshot(out)
    run_dir = tmp_path / "run"
    command = ("adopt", run_dir, "--prompts", prompts, "--model", world.model, "--outputs", out, "--out", out)
    killed = hsjournal(*command, "--dtype", "float32", HSJOURNAL_FAULTS="verify.done=kill@3")
    assert killed.code == -9, killed
    refused = hsjournal("run", tmp_path / "other", "--prompts", prompts, "--model", world.model, "--out", out)
    assert (refused.code, "adopt" in refused.err) == (2, True)
    done = hsjournal("adopt", run_dir, "--outputs", out, "--json")
    assert done.code == 0, done
    report = done.json()
    assert report["adopted"] + report["already"] == len(HALF)
    assert snapshot(out) == before
    finish(run_dir)
    after = snapshot(out)
    assert {path: after[path] for path in before} == before
    assert len(after) == ROWS
    assert hsjournal("verify", run_dir).code == 0


def test_files_of_other_layers_are_found_out(world: World, prompts: Path, tmp_path: Path) -> None:
    sources = leave_half(world, prompts, tmp_path / "half", layers=[0, 2, 3])  # the other way to number [1, 3, 4]
    run_dir = tmp_path / "run"
    done = hsjournal("adopt", *new_run(world, run_dir, prompts), "--outputs", sources)
    assert done.code == 1, done
    assert "aux_0 by" in done.err
    assert "nothing was adopted" in done.err
    assert "Traceback" not in done.err
    assert set(states_of(run_dir).values()) == {"pending"}


def test_damage_is_repaired_and_resume_restores(world: World, prompts: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = hsjournal("run", *new_run(world, run_dir, prompts), "--plain")
    assert done.code == 0, done
    sent, out = world.sent_rows(), run_dir / "out"
    files = {row: out / "rows_0-2000" / f"data_{row}.ckpt" for row in range(ROWS)}
    files[2].unlink()
    files[4].write_bytes(files[4].read_bytes()[:-1])
    shutil.copy(files[6], files[8])
    data = bytearray(files[9].read_bytes())
    data[len(data) // 2] ^= 8
    files[9].write_bytes(data)
    before = snapshot(out)
    found = hsjournal("verify", run_dir, "--repair", "--json")
    assert found.code == 3, found
    kinds = {d["row"]: d["kind"] for d in found.json()["damaged"]}
    assert kinds == {2: "missing", 4: "wrong_size", 8: "wrong_content", 9: "wrong_digest"}
    assert found.json()["repaired"] == 4
    assert hsjournal("verify", run_dir).code == 0
    finish(run_dir)
    assert world.sent_rows() - sent == Counter({2: 1, 4: 1, 8: 1, 9: 1})
    assert hsjournal("verify", run_dir).code == 0
    assert sorted(check_outputs(out, world.reference)) == list(range(ROWS))
    after = snapshot(out)
    for row in (0, 1, 3, 5, 6, 7, 10, 11):
        assert after[str(files[row])] == before[str(files[row])]


def test_verify_beside_a_live_run_accuses_nobody(world: World, prompts: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    slow = {
        "HSJOURNAL_FAULTS": "verify.reading=delay:0.4; sink.linked=delay:0.2",
        "HSJOURNAL_SHM": os.environ["HSJOURNAL_SHM"],
    }
    live = started("run", *new_run(world, run_dir, prompts), "--plain", "--sink-threads", "1", log=log, **slow)
    looks = 0
    try:
        while live.poll() is None:
            if (run_dir / "manifest.toml").exists():
                found = hsjournal("verify", run_dir, "--json")
                assert found.code == 0, found
                assert found.json()["unowned"]["count"] == 0
                looks += found.json()["live"] and 0 < found.json()["checked"] < ROWS
            else:
                time.sleep(0.05)
    finally:
        if live.poll() is None:
            live.terminate()
        live.wait()
    assert live.returncode == 0, log.read_text()
    assert looks > 0
    assert hsjournal("verify", run_dir, "--json").json()["checked"] == ROWS


def test_a_failed_row_is_tried_again_on_demand(world: World, prompts: Path, tmp_path: Path) -> None:
    broken = world.engine.root.parent / "broken"
    broken.touch()
    run_dir = tmp_path / "run"
    try:
        done = hsjournal("run", *new_run(world, run_dir, prompts), "--plain", "--max-strikes", "1")
    finally:
        broken.unlink()
    assert done.code == 3, done
    assert {row for row, state in states_of(run_dir).items() if state == "failed"} == {5}
    again = hsjournal("retry", run_dir, "--all", "--json")
    assert again.json() == {"retried": 1, "rows": [5]}
    finish(run_dir)
    assert set(states_of(run_dir).values()) == {"verified"}
    aux, _ = world.reference.states(torch.tensor(json.loads(prompts.read_text().splitlines()[5])["input_ids"]), LAYERS)
    made = torch.load(run_dir / "out" / "rows_0-2000" / "data_5.ckpt", weights_only=True)
    assert worst_row_error(made["aux_hidden_state"][0], aux) <= 1e-4
