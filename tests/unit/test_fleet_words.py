"""A fleet's words: what is refused before a node hears of it, what its screen shows, how it ends."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from hsjournal.cli import fleeting
from hsjournal.errors import ExitCode, UsageError
from hsjournal.fleet.openness import is_loopback, judge
from hsjournal.fleet.order import expanded
from hsjournal.fleet.telling import Telling, fleet_code
from hsjournal.ui.fleet import PlainFleet, table, total_line
from tests.helpers.cli import hsjournal


def test_a_cluster_without_authentication_is_refused_off_loopback_only():
    outside = {"open": True, "addresses": ["127.0.0.1", "192.0.2.7"]}
    with pytest.raises(UsageError, match=r"192\.0\.2\.7.*--trust-cluster"):
        judge(outside, trusted=False)
    judge(outside, trusted=True)
    judge({"open": False, "addresses": ["192.0.2.7"]}, trusted=False)
    judge({"open": True, "addresses": ["127.0.0.1", "::1", "localhost"]}, trusted=False)


def test_a_name_that_nobody_knows_is_not_loopback():
    assert not is_loopback("no-such-host.invalid")


@pytest.mark.parametrize("words", [["--shard", "1/2"], ["--dry-run"], ["--parent-fd", "3"]])
def test_what_the_fleet_decides_is_not_handed_on(words: list[str]):
    with pytest.raises(UsageError, match=words[0]):
        fleeting.checked(["--prompts", "p.jsonl", *words])


def test_an_option_that_run_does_not_know_is_refused_before_any_node_hears_of_it(tmp_path: Path):
    done = hsjournal("fleet", "run", "--ray", "h:1", "--shards", "2", "--base", tmp_path, "--promts", "p.jsonl")
    assert done.code == 2, done
    assert "--promts" in done.err


@pytest.mark.parametrize("words", [[], ["--ray", "h:6379", "--slurm"]])
def test_one_engine_must_be_named(words: list[str]):
    done = hsjournal("fleet", "run", "--shards", "2", "--base", "/b", *words)
    assert done.code == 2, done
    assert "--ray HOST:PORT or --slurm" in done.err


def test_a_base_of_each_node_needs_a_store():
    for base, one_machine in (("$HSJOURNAL_NODE_DIR", True), ("/local", False)):
        with pytest.raises(UsageError, match="--store"):
            fleeting.store_of("", base, one_machine=one_machine)
    assert fleeting.store_of("", "/local", one_machine=True) == "/local"
    assert fleeting.store_of("/shared", "$HSJOURNAL_NODE_DIR") == "/shared"


def test_a_variable_that_the_node_lacks_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NODE_DISK", "/nvme")
    assert expanded("$NODE_DISK/hsj") == Path("/nvme/hsj")
    with pytest.raises(UsageError, match="NOT_THERE"):
        expanded("${NOT_THERE}/hsj")


@pytest.mark.parametrize("name", ["../up", "", "a/b", "x" * 65])
def test_a_name_that_is_no_folders_is_refused(name: str):
    with pytest.raises(UsageError, match="--name"):
        fleeting.order(name, 2, "/b", (), None, None, "")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], ExitCode.DONE),
        ([0, 3], ExitCode.FAILED_SAMPLES),
        ([3, 13], ExitCode.GAVE_UP),
        ([0, 143], ExitCode.TERMINATED),
    ],
)
def test_how_a_fleet_ends(codes: list[int], expected: ExitCode):
    assert fleet_code([Telling("1/2", 1, code=code) for code in codes]) == expected


def test_plain_lines_tell_every_start_and_end_and_nothing_twice():
    out = io.StringIO()
    screen = PlainFleet(out)
    first = Telling("1/2", 1, "node\x1b[31m", "/r", "running", {"verified": 3, "pending": 5}, 2.0)
    for _ in range(3):
        screen.show([first, Telling("2/2")])
    screen.show([Telling("1/2", 2, "node9", "/r", "done", {"verified": 8}, code=0), Telling("2/2")])
    text = out.getvalue()
    assert "\x1b" not in text
    assert text.count("incarnation 1") == 1
    assert "shard 1/2 on node9, incarnation 2: 8/8 verified: done" in text


def test_the_table_fits_and_shows_what_gave_up_first():
    tellings = [
        Telling(f"{n}/64", 1, f"node{n}", "", "running: all is well", {"verified": n}, 1.0) for n in range(1, 64)
    ]
    tellings.append(Telling("64/64", 1, "node64", "", "exit code 13: no server", code=13))
    console = Console(width=80, height=24, file=io.StringIO(), record=True)
    console.print(table(tellings, 19))
    lines = console.export_text().splitlines()
    assert len(lines) <= 21
    assert "64/64" in lines[1]
    assert "45 more" in lines[-1]
    assert all(len(line) <= 80 for line in lines)
    assert "1 of 64 shards ended, 63 under way" in total_line(tellings)
