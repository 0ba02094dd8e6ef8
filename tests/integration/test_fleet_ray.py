"""A fleet on a real Ray cluster: an actor is killed, a node is lost with all that it had, another one comes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hsjournal.errors import UsageError
from hsjournal.fleet import openness
from hsjournal.fleet.openness import is_loopback, judge, refuse_open_cluster
from hsjournal.watch.children import ask, module
from tests.helpers.cli import hsjournal
from tests.helpers.fleets import incarnation, index_of, make_job, stamps, supervisor_of, until
from tests.helpers.ray_cluster import ray_cluster

ROWS = 40
WITHOUT_TOKEN = [f"{name}={value}" for name, value in openness.WITHOUT_TOKEN.items()]


@pytest.mark.timeout(600)
def test_an_actor_killed_and_a_node_lost(tmp_path: Path):
    job = [*make_job(tmp_path, ROWS), "--sink-threads", "1"]  # slow enough to be killed in the middle
    slow = tmp_path / "slow"
    slow.touch()
    faults = {"HSJOURNAL_FAULTS": f"sink.opened=delay:8,while:{slow}", "OMP_NUM_THREADS": "1"}
    fleet = ["fleet", "run", "--shards", "2", "--base", "$HSJOURNAL_NODE_DIR", "--name", "f", "--plain"]
    log = tmp_path / "driver.log"
    with ray_cluster(tmp_path) as cluster:
        without = cluster.environment | {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": ""}
        nodes = {name: cluster.add(name, **faults) for name in ("a", "b")}
        words = [sys.executable, "-m", "hsjournal.cli.main", *fleet, "--ray", cluster.address, *map(str, job)]
        with log.open("wb") as out:
            driver = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path,
                env=os.environ | cluster.environment,
            )  # fmt: skip
        try:
            runs = until(lambda: _runs(tmp_path, nodes), 120, log.read_text())
            until(lambda: all(len(stamps(run)) >= 3 for run in runs.values()), 120, log.read_text())

            # The actor on node a is killed: its run ends with it, and the next start goes on where it stood.
            mine = supervisor_of(runs["a"])
            family, before = [mine, *mine.children(recursive=True)], stamps(runs["a"])
            mine.parent().kill()  # type: ignore[union-attr]
            _, alive = psutil.wait_procs(family, timeout=30)
            assert not alive, "the run outlived its actor"

            # Node b goes with its folder. A copy stands for a node that was only cut off, and comes back later.
            kept = tmp_path / "cut off"
            family = supervisor_of(runs["b"]).children(recursive=True)
            had = runs["b"].name
            _copy(runs["b"], kept / "f" / had)
            cluster.remove("b")
            _, alive = psutil.wait_procs(family, timeout=30)
            assert not alive, "the run outlived its node"
            there = stamps(kept / "f" / had)
            until(lambda: incarnation(runs["a"]) == 2, 120, log.read_text())
            again = cluster.add("c", **faults) / "f" / had
            until(lambda: incarnation(again) == 2 or incarnation(nodes["a"] / "f" / had) == 2, 120, log.read_text())
            driver.send_signal(signal.SIGHUP)  # its terminal is closed
            slow.unlink()
            assert driver.wait(180) == 0, log.read_text()
        finally:
            driver.kill()
            driver.wait()
        refused = hsjournal(*fleet, "--ray", cluster.address, *job, timeout=120, **without)
        assert refused.code == 13, refused  # who has no token can't join

    told = log.read_text() + (tmp_path / "f.screen.log").read_text()
    assert "nobody reads here any more" in told
    assert "shard 1/2" in told
    assert "incarnation 2" in told
    assert "Traceback" not in told
    assert f"{ROWS}/{ROWS} rows verified" in told
    places = [tmp_path / "a", tmp_path / "c", kept]
    merged = hsjournal("fleet", "merge", *places, "--to", tmp_path / "index.jsonl", "--json")
    assert merged.code == 0, merged
    assert merged.json()["passed_over"] == [str(kept / "f" / had)]
    lines = index_of(tmp_path / "index.jsonl")
    assert [line["id"] for line in lines] == [f"s{number}" for number in range(ROWS)]
    assert not [line for line in lines if line["file"].startswith(str(kept))]
    sound = hsjournal("fleet", "verify", *places, "--json")
    assert sound.code == 0, sound
    assert sound.json()["checked"] == ROWS
    assert stamps(runs["a"]).items() >= before.items(), "a file of the first start was touched"
    assert stamps(kept / "f" / had) == there


@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_open", [True, False])
def test_a_real_cluster_says_whether_it_talks_to_whoever_comes(tmp_path: Path, is_open: bool):
    with ray_cluster(tmp_path, is_open=is_open) as cluster:
        found = ask(["env", *WITHOUT_TOKEN, *module("hsjournal.fleet.openness", cluster.address)], 60.0)
        refuse_open_cluster(cluster.address, trusted=False)  # on loopback it may be open
    assert found["open"] is is_open
    assert all(map(is_loopback, found["addresses"]))
    assert len(found["addresses"]) == (2 if is_open else 0)  # the head as it was named, and as it names itself
    outside = found | {"addresses": [*found["addresses"], "192.0.2.7"]}
    if is_open:
        with pytest.raises(UsageError, match=r"192\.0\.2\.7.*--trust-cluster"):
            judge(outside, trusted=False)
    judge(outside, trusted=is_open)


def _runs(folder: Path, nodes: dict[str, Path]) -> dict[str, Path] | None:
    """The one run directory of each node, once they are there."""
    found = {name: [p.parent for p in node.glob("f/*/fleet.json")] for name, node in nodes.items()}
    return {name: some[0] for name, some in found.items()} if all(found.values()) else None


def _copy(run_dir: Path, to: Path) -> None:
    """A run directory with what it says of its own place; the journal under its writer is whole with its WAL."""
    shutil.copytree(run_dir, to, ignore=shutil.ignore_patterns("*.lock", ".hsjournal-*"))
    manifest = to / "manifest.toml"
    manifest.write_text(manifest.read_text().replace(str(run_dir), str(to)))
    assert os.path.exists(to / "journal.db")
