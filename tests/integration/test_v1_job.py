"""A whole job against a v1 server, the incident's kind: real ``torch.save`` dumps without identity, and what goes wrong there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.helpers.cli import REPOSITORY, Result, hsjournal, started
from tests.helpers.mounts import fill, tmpfs
from tests.helpers.v1_server import LAYERS, Behaviour, V1Call, V1Server, good, states

LENGTHS = (9, 12, 12, 12, 15, 9, 21, 30)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [[1 + (7 * row + 3 * i) % 900 for i in range(length)] for row, length in enumerate(lengths)]


@contextmanager
def gateway(server: V1Server, state: Path, *options: str) -> Iterator[str]:
    arguments = [
        sys.executable, "-m", "hsjournal.server.v1", "--server", server.url, "--handover-root", str(server.root),
        "--layers", ",".join(map(str, LAYERS)), "--state", str(state), *options,
    ]  # fmt: skip
    log = state.with_suffix(".log")
    with log.open("ab") as errors:
        child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, cwd=REPOSITORY)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line, log.read_text()
        yield json.loads(line)["url"]
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def write_prompts(folder: Path, lengths: Sequence[int]) -> Path:
    file = folder / "prompts.jsonl"
    lines = [{"id": f"s{r}", "input_ids": ids, "loss_mask": [1] * len(ids)} for r, ids in enumerate(prompts(lengths))]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def command(folder: Path, server: V1Server, *options: str, url: str = "") -> list[str | Path]:
    attached = ("--server", url) if url else ("--server", server.url, "--protocol", "v1", "--layers", "1,3,5")
    return [
        "run", folder / "run", "--prompts", folder / "prompts.jsonl", "--model", folder, *attached,
        "--handover-root", server.root, "--retry-pause", "0.3", "--plain", *options,
    ]  # fmt: skip


def run(folder: Path, server: V1Server, lengths: Sequence[int], *options: str, url: str = "") -> Result:
    write_prompts(folder, lengths)
    return hsjournal(*command(folder, server, *options, url=url), timeout=120)


def check(folder: Path, lengths: Sequence[int]) -> None:
    """Every file holds its own row's states."""
    files = {int(p.stem.removeprefix("data_")): p for p in (folder / "run" / "out").rglob("*.ckpt")}
    assert sorted(files) == list(range(len(lengths)))
    for row, ids in enumerate(prompts(lengths)):
        data = torch.load(files[row], weights_only=True)
        assert data["input_ids"].tolist() == ids
        aux = torch.cat([states(ids, k) for k in range(len(LAYERS))], dim=1)
        assert torch.equal(data["aux_hidden_state"][0], aux)
        assert torch.equal(data["hidden_state"][0], states(ids, len(LAYERS)))


def left(server: V1Server) -> list[str]:
    return sorted(os.listdir(server.root))


def test_a_whole_job(tmp_path: Path) -> None:
    with V1Server(tmp_path / "root", pace=0.05) as server, gateway(server, tmp_path / "state") as url:
        done = run(tmp_path, server, LENGTHS, url=url)
        assert done.code == 0, done.out + done.err
        check(tmp_path, LENGTHS)
        assert left(server) == []
        assert all(len(set(together)) == len(together) for together in server.together), "equal counts are serialised"
        assert any(len(together) > 1 for together in server.together), "and others are not"


def test_a_late_dump_never_lands_in_another_row(tmp_path: Path) -> None:
    """Row 1's first request times out; its dump comes while others of the same length want to go."""

    def late(call: V1Call) -> int:
        call.server.soon(call.dump, 2.5)
        time.sleep(3.5)
        return 200

    with V1Server(tmp_path / "root", {(1, 1): late}) as server, gateway(server, tmp_path / "state") as url:
        done = run(tmp_path, server, LENGTHS, "--sample-timeout", "1.5", url=url)
        assert done.code == 0, done.out + done.err
        check(tmp_path, LENGTHS)
        assert left(server) == [], "the late one is used or dropped, by its own name"
        assert all(len(set(together)) == len(together) for together in server.together)


def test_what_is_wrong_with_a_dump_is_refused_and_sent_again(tmp_path: Path) -> None:
    def wrong(**changes: Any) -> Behaviour:
        def answer(call: V1Call) -> int:
            call.dump(**changes)
            return 200

        return answer

    script: dict[tuple[int | None, int], Behaviour] = {
        (0, 1): wrong(rows=5),
        (1, 1): wrong(tear="final.pt"),
        (2, 1): wrong(aux=2),
        (3, 1): wrong(meta={"num_tokens": 40}),
        (5, 1): wrong(meta={"num_tokens": 9, "rid": "somebody's"}),
    }
    with (
        V1Server(tmp_path / "root", script) as server,
        gateway(server, tmp_path / "state", "--dump-timeout", "2") as url,
    ):
        done = run(tmp_path, server, LENGTHS, "--max-in-flight", "1", "--sample-timeout", "8", url=url)
        assert done.code == 0, done.out + done.err
        check(tmp_path, LENGTHS)
        assert all(name.startswith("req_") for name in left(server)), (
            "what is refused is left alone: it may be anybody's"
        )


def test_dumps_older_than_the_run_are_not_taken(tmp_path: Path) -> None:
    """``req_7`` with ``done``, of the right length, from another life of the server: rows of something else."""
    with V1Server(tmp_path / "root") as server, gateway(server, tmp_path / "state") as url:
        for length in set(LENGTHS):
            server.dump([5] * length)
        stale = left(server)
        done = run(tmp_path, server, LENGTHS, url=url)
        assert done.code == 0, done.out + done.err
        check(tmp_path, LENGTHS)
        assert left(server) == stale


@pytest.mark.parametrize("tells_load", [True, False])
def test_two_answers_of_one_length_are_both_refused(tmp_path: Path, tells_load: bool) -> None:
    def twice(call: V1Call) -> int:
        first = call.dump(of=[3] * len(call.ids), meta={"num_tokens": len(call.ids)})
        done = first / "done"
        done.unlink()
        second = call.dump(meta={"num_tokens": len(call.ids)})
        (second / "done").unlink()
        done.touch()
        (second / "done").touch()
        return 200

    with (
        V1Server(tmp_path / "root", {(4, 1): twice}, tells_load=tells_load) as server,
        gateway(server, tmp_path / "state", "--dump-timeout", "2") as url,
    ):
        lengths = LENGTHS if tells_load else (9, 12, 15)
        if not tells_load:

            def twice_and_restart(call: V1Call) -> int:
                server.restart(1.0, 1.0)
                return twice(call)

            server.script = {(1, 1): twice_and_restart}
        done = run(tmp_path, server, lengths, "--sample-timeout", "20", url=url)
        assert done.code == 0, done.out + done.err
        check(tmp_path, lengths)


def test_a_length_that_waits_for_a_restart_costs_no_row_a_strike(tmp_path: Path) -> None:
    """A server without load, a row that it keeps for ever, and others as long: the probes' own lengths are barred too."""

    def keeps(call: V1Call) -> int:
        call.server.restart(14.0, 0.5)
        time.sleep(13.0)
        return 500

    def keeps_too(call: V1Call) -> int:
        time.sleep(13.0)
        return 500

    lengths = (8, 16, 8, 16, 16, 12, 30)
    script: dict[tuple[int | None, int], Behaviour] = {(0, 1): keeps, (1, 1): keeps_too}
    with (
        V1Server(tmp_path / "root", script, tells_load=False) as server,
        gateway(server, tmp_path / "state", "--admit-timeout", "1") as url,
    ):
        done = run(tmp_path, server, lengths, "--sample-timeout", "3", "--max-in-flight", "4", url=url)
        assert done.code == 0, done.out + done.err
        check(tmp_path, lengths)
        events = [json.loads(line) for line in hsjournal("events", tmp_path / "run").out.splitlines()]
        struck = [e["row"] for e in events if e["kind"] == "sent_back" and e["detail"]["strike"]]
        assert sorted(struck) in ([0, 1], [0], [1]), "those that timed out themselves, once"
        held = [e["detail"]["why"] for e in events if e["kind"] == "paused" and e["detail"]["what"] == "held"]
        assert held
        assert any("started anew" in why for why in held), (
            held
        )  # the first may come before it is known that it tells no load
        assert all(len(set(together)) == len(together) for together in server.together)


def test_a_root_that_is_deleted_under_a_v1_job_is_waited_for(tmp_path: Path) -> None:
    """Directories and all: the rows that lost theirs are sent again, and nobody is struck."""
    lengths = LENGTHS * 2

    def loses(call: V1Call) -> int:
        shutil.rmtree(call.server.root)
        time.sleep(1.0)
        call.server.root.mkdir(mode=0o700, exist_ok=True)
        return good(call)

    with (
        V1Server(tmp_path / "root", {(5, 1): loses}, pace=0.3) as server,
        gateway(server, tmp_path / "state", "--dump-timeout", "3") as url,
    ):
        done = run(tmp_path, server, lengths, "--sample-timeout", "10", url=url)
        assert done.code == 0, done.out + done.err
        check(tmp_path, lengths)


@pytest.mark.root
def test_a_root_that_fills_up_under_a_v1_job_costs_no_strike(tmp_path: Path) -> None:
    """The copy has no room beside the original, until somebody makes some."""
    lengths = (200, 120, 160, 90)

    def fills(call: V1Call) -> int:
        call.dump()
        fill(call.server.root)
        call.server.soon((call.server.root / "filler").unlink, 4.0)
        return 200

    with (
        tmpfs(tmp_path / "small", "80m") as root,
        V1Server(root, {(1, 1): fills}) as server,
        gateway(server, tmp_path / "state", "--dump-timeout", "3") as url,
    ):
        options = ("--sample-timeout", "10", "--max-in-flight", "1")
        done = run(tmp_path, server, lengths, *options, url=url)
        assert done.code == 0, done.out + done.err
        check(tmp_path, lengths)
        events = [json.loads(line) for line in hsjournal("events", tmp_path / "run").out.splitlines()]
        assert not [e for e in events if e["kind"] == "sent_back" and e["detail"]["strike"]]


def test_a_server_started_anew_frees_all_counts(tmp_path: Path) -> None:
    def dies(call: V1Call) -> int:
        call.server.restart(0, 1.5)
        call.aborted.wait(30)
        return 500

    with V1Server(tmp_path / "root", {(3, 1): dies}) as server, gateway(server, tmp_path / "state") as url:
        done = run(tmp_path, server, LENGTHS, "--sample-timeout", "10", url=url)
        assert done.code == 0, done.out + done.err
        check(tmp_path, LENGTHS)


def test_the_gateway_dies_and_the_next_one_knows_what_is_still_at_the_server(tmp_path: Path) -> None:
    """It is started again; what the first one had sent is barred until the server has drained."""
    lengths = LENGTHS * 3
    write_prompts(tmp_path, lengths)
    with V1Server(tmp_path / "root", pace=0.4) as server:
        child = started(*command(tmp_path, server), log=tmp_path / "log")
        deadline = time.monotonic() + 90
        while sum(1 for call in server.calls if call.row is not None) < 6:
            assert child.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        gateways = [
            p
            for p in psutil.Process(child.pid).children(recursive=True)
            if p.status() != psutil.STATUS_ZOMBIE and "hsjournal.server.v1" in p.cmdline()
        ]
        assert gateways
        gateways[0].kill()
        assert child.wait(120) == 0, (tmp_path / "log").read_text()
        check(tmp_path, lengths)
        assert all(len(set(together)) == len(together) for together in server.together)


def test_what_is_not_proven_is_said(tmp_path: Path) -> None:
    with V1Server(tmp_path / "root") as server:
        done = run(tmp_path, server, (9, 12))
        assert done.code == 0, done.out + done.err
        check(tmp_path, (9, 12))
        events = [json.loads(line) for line in hsjournal("events", tmp_path / "run").out.splitlines()]
        assert "token count alone" in next(e for e in events if e["kind"] == "identity_unproven")["detail"]["why"]
        assert not [
            p for p in psutil.Process().children(recursive=True) if "hsjournal.server.v1" in " ".join(p.cmdline())
        ]
