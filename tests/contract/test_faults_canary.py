"""Right digests and wrong rows (FAULTS.md A3, A23, B12): what only a known prompt, sent again, can tell. The real worker.

| case | test |
|---|---|
| all is well | test_a_canary_comes_every_so_many_samples_and_at_the_end |
| A3, A23: rows go wrong during the run | test_rows_that_go_wrong_stop_the_run_and_are_named, test_rows_in_doubt_are_made_again_on_demand |
| one of two servers goes wrong | test_one_of_two_servers_goes_wrong |
| once only | test_one_odd_canary_is_told_and_the_run_goes_on |
| B12: other weights of the same shape | test_other_weights_at_resume, test_other_weights_after_a_restart_of_the_server |
| the server goes while the canary is out | test_a_canary_that_is_lost_costs_nothing |
| no room | test_a_canary_waits_for_room, test_no_room_for_a_probe_prompt |
| alone and in company | test_states_that_depend_on_the_company, test_a_server_that_is_the_same_in_company |
"""

from __future__ import annotations

import itertools
from array import array
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from hsjournal.config import Endpoint
from hsjournal.dump.protocol import RequestId
from hsjournal.errors import ExitCode
from hsjournal.journal.doubt import rows_in
from hsjournal.mirror import SNAPSHOT, Mirror
from hsjournal.ops.doubted import make_again
from tests.helpers.fake_server import Behaviour, Call, FakeServer, later, status, until
from tests.helpers.worker_runs import BYTES_PER_TOKEN, RUN_ID, Run, collected  # noqa: F401

LENGTHS = tuple(10 + i for i in range(20))
N = len(LENGTHS)
OTHER_ROWS = 700
"""A shift of the fake server's rows that makes them other rows; 1 is a last bit."""


class Turncoat:
    """A server whose rows become others when it is told, digests and all else staying right."""

    def __init__(self) -> None:
        self.noise = 0

    async def __call__(self, call: Call) -> web.StreamResponse:
        call.publish(noise=self.noise)
        return call.reply()


def canaries(fake: FakeServer) -> list[int]:
    """How many samples came before each canary; the cheap probes are shorter."""
    found, samples = [], 0
    for call in fake.calls:
        if call.rid.row is not None:
            samples += 1
        elif len(call.ids) == 64:
            found.append(samples)
    return found


def rows_at(server: FakeServer) -> set[int]:
    return {call.rid.row for call in server.calls if call.rid.row is not None}


def values(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event.detail for event in run.events(kind)]


async def test_a_canary_comes_every_so_many_samples_and_at_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, canary_every=8, max_in_flight=1)
    async with FakeServer(run.root) as fake:
        fake.on(later(0.01))
        end = await run.work(server_url=fake.url)
        flown = canaries(fake)
    assert end.code == ExitCode.DONE, end.sentence
    assert flown[:2] == [0, 0]  # twice at the start: that calibrates
    assert flown[-1] == N
    assert len(flown) == 5
    assert all(8 <= later_one - one <= 10 for one, later_one in itertools.pairwise(flown[1:-1]))
    assert len(run.events("canary")) == 4
    (preflight,) = values(run, "preflight")
    assert preflight["agreement"]["tolerance"]["median_error"] > 0
    assert preflight["boot_id"] == "life-1"
    run.assert_all_verified()


async def test_canaries_off(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        end = await run.work(server_url=fake.url)
        assert canaries(fake) == []
    assert end.code == ExitCode.DONE
    assert run.events("canary") == []


async def broken_run(tmp_path: Path) -> tuple[Run, str]:
    """A run of a server that goes wrong after the 8th sample."""
    run = Run(tmp_path, LENGTHS, canary_every=4, max_in_flight=1)
    turncoat = Turncoat()

    async def turn(call: Call) -> web.StreamResponse:
        if call.rid.row == 9:
            turncoat.noise = OTHER_ROWS
        return await turncoat(call)

    async with FakeServer(run.root) as fake:
        fake.on(turn, probes=True)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.SERVER
    return run, end.sentence


async def test_rows_that_go_wrong_stop_the_run_and_are_named(tmp_path: Path) -> None:
    run, sentence = await broken_run(tmp_path)
    assert "gives other states for the run's probe prompt" in sentence
    assert "aux_0 differs, its median row by" in sentence
    assert "retry RUN_DIR --doubted" in sentence
    (odd,), (failed,), (doubted,) = (values(run, kind) for kind in ("canary_odd", "canary_failed", "rows_doubted"))
    assert odd["url"] == failed["url"] == doubted["url"]
    rows = rows_in(doubted["rows"])
    assert rows == list(range(rows[0], rows[-1] + 1))
    assert failed["rows"] in sentence
    # Everything since it went wrong is named, and hardly more.
    taken = [row["row"] for row in run.rows() if row["attempt"]]
    assert set(rows) >= {row for row in taken if row >= 9}
    assert 4 <= rows[0] <= 9
    assert len(taken) < N  # it did not go on
    assert not [name for name in run.in_root() if "-p" in name]


async def test_rows_in_doubt_are_made_again_on_demand(tmp_path: Path) -> None:
    run, _ = await broken_run(tmp_path)
    (doubted,) = values(run, "rows_doubted")
    before = run.states()
    again = make_again(run.paths)
    assert list(again.rows) == rows_in(doubted["rows"])
    assert {run.states()[row] for row in again.rows} == {"pending"}
    assert [s for r, s in enumerate(run.states()) if r not in again.rows] == [
        s for r, s in enumerate(before) if r not in again.rows
    ]
    assert make_again(run.paths).rows == ()
    async with FakeServer(run.root, boot_id="life-2") as fake:
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()  # with the right rows: what was wrong is gone


async def test_a_dump_in_doubt_that_still_lies_in_the_root_is_not_taken(tmp_path: Path) -> None:
    """Of a row that was under way when the canary failed, or that came after the worker had ended."""
    run, _ = await broken_run(tmp_path)
    async with FakeServer(run.root, boot_id="life-1") as late:
        for row in rows_in(values(run, "rows_doubted")[0]["rows"]):
            rid = RequestId.sample(RUN_ID, row, run.row(row)["attempt"], LENGTHS[row])
            if not (run.root / str(rid)).exists():
                late.publish(array("I", run.ids[row]), rid, noise=OTHER_ROWS)
    make_again(run.paths)
    async with FakeServer(run.root, boot_id="life-2") as fake:
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()


async def test_one_of_two_servers_goes_wrong(tmp_path: Path) -> None:
    run = Run(tmp_path, tuple(10 + i % 7 for i in range(40)), canary_every=4, max_in_flight=1)
    turncoat = Turncoat()

    async def turn(call: Call) -> web.StreamResponse:
        if len(rows_at(call.server)) == 7:
            turncoat.noise = OTHER_ROWS
        return await later(0.02, turncoat)(call)

    async with FakeServer(run.root, boot_id="a-1") as a, FakeServer(run.root, boot_id="b-1") as b:
        a.on(later(0.02))
        b.on(turn, probes=True)
        end = await run.work(server_url=a.url, more_servers=(Endpoint(b.url, str(b.root)),))
        bad, good = rows_at(b), rows_at(a)
        assert len(good) > len(bad) + 10
        taken_wrong = set(list(dict.fromkeys(c.rid.row for c in b.calls if c.rid.row is not None))[6:])
    assert end.code == ExitCode.FAILED_SAMPLES, end.sentence  # done, but for rows that somebody must decide about
    assert run.states() == ["verified"] * 40
    (doubted,) = values(run, "rows_doubted")
    named = set(rows_in(doubted["rows"]))
    assert taken_wrong <= named <= bad
    assert not named & (good - bad)
    make_again(run.paths)
    async with FakeServer(run.root, boot_id="a-1") as again:
        assert (end := await run.work(server_url=again.url)).code == ExitCode.DONE, end.sentence
    run.assert_all_verified()


async def test_one_odd_canary_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, canary_every=5, max_in_flight=1)
    seen = 0

    async def odd_once(call: Call) -> web.StreamResponse:
        nonlocal seen
        seen += call.rid.row is None and len(call.ids) == 64
        call.publish(noise=OTHER_ROWS if seen == 3 and call.rid.row is None else 0)
        return call.reply()

    async with FakeServer(run.root) as fake:
        fake.on(odd_once, probes=True)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert len(run.events("canary_odd")) == 1
    assert run.events("canary_failed") == []
    run.assert_all_verified()


@pytest.mark.parametrize("boot_id", ["life-1", "life-2"])
async def test_other_weights_at_resume(tmp_path: Path, boot_id: str) -> None:
    run = Run(tmp_path, LENGTHS, canary_every=5)
    async with FakeServer(run.root) as fake:
        fake.on(later(0.1, status(401)), row=8)
        end = await run.work(server_url=fake.url)
        assert end.code == ExitCode.SERVER
    verified = run.states().count("verified")
    assert 0 < verified < N
    turncoat = Turncoat()
    turncoat.noise = OTHER_ROWS
    async with FakeServer(run.root, boot_id=boot_id) as fake:
        fake.on(turncoat, probes=True)
        end = await run.work(server_url=fake.url)
        assert all(call.rid.row is None for call in fake.calls)
    assert end.code == ExitCode.SERVER
    assert "other states for the run's probe prompt" in end.sentence
    assert run.states().count("verified") == verified
    async with FakeServer(run.root, boot_id="life-3") as fake:
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()


async def test_other_weights_after_a_restart_of_the_server(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, canary_every=100)

    async def other_life(call: Call) -> web.StreamResponse:
        call.publish(noise=OTHER_ROWS if call.server.boot_id == "life-2" else 0)
        return call.reply()

    async def die(call: Call) -> web.StreamResponse:
        call.server.soon(call.server.bounce("life-2", 0.1))
        return call.cut()

    async with FakeServer(run.root) as fake:
        fake.on(die, row=6, times=1)
        fake.on(other_life, probes=True)
        end = await run.work(server_url=fake.url)
        after = [call for call in fake.calls if call.nth > 1 and call.rid.row is not None]
        assert after == []  # nothing was sent to the other one
    assert end.code == ExitCode.SERVER
    assert "other states for the run's probe prompt" in end.sentence
    for row, state in enumerate(run.states()):
        if state == "verified":
            run.assert_whole(row)


async def test_a_canary_that_is_lost_costs_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, canary_every=6, max_in_flight=2)
    flown = 0

    def is_told() -> bool:
        snapshot = Mirror(run.paths.mirror).read(SNAPSHOT) or {"pauses": {}}
        return "server" in snapshot["pauses"]

    async def bounce(server: FakeServer) -> None:
        await until(is_told)
        await server.bounce("life-2", 0.1)

    async def cut_the_third(call: Call) -> web.StreamResponse:
        nonlocal flown
        if len(call.ids) == 64:
            flown += 1
            if flown == 3:
                call.server.soon(bounce(call.server))
        if call.rid.row is None and flown >= 3 and call.server.boot_id == "life-1":
            return call.cut()
        call.publish()
        return call.reply()

    async with FakeServer(run.root) as fake:
        assert fake.boot_id == "life-1"
        fake.on(cut_the_third, probes=True)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.strikes() == [0] * N
    assert any("canary did not come back" in event.detail["why"] for event in run.events("paused"))
    assert len(run.events("canary")) >= 3
    run.assert_all_verified()


async def test_a_canary_waits_for_room(tmp_path: Path) -> None:
    slack = 1 << 16
    budget = 64 * BYTES_PER_TOKEN + slack  # the canary alone, or one sample
    run = Run(tmp_path, LENGTHS, canary_every=4, max_in_flight=4, handover_budget=budget)
    async with FakeServer(run.root, budget=budget) as fake:
        fake.on(later(0.02), row=range(N))
        end = await run.work(server_url=fake.url)
        assert len(canaries(fake)) >= 5
    assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()


async def test_no_room_for_a_probe_prompt(tmp_path: Path) -> None:
    run = Run(tmp_path, (1, 2), canary_every=1, handover_budget=(1 << 16) + 3 * BYTES_PER_TOKEN)
    async with FakeServer(run.root) as fake:
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    (preflight,) = values(run, "preflight")
    assert preflight["agreement"]["tokens"] == 3  # as many as there is room for
    run.assert_all_verified()


def sglang_run(tmp_path: Path, **settings: Any) -> Run:
    return Run(tmp_path, LENGTHS, manifest={"engine": "sglang"}, **settings)


def sglang(run: Run) -> FakeServer:
    fake = FakeServer(run.root, max_probes=7, tells=False)
    fake.meta["engine"] = "sglang"
    fake.info["max_total_num_tokens"] = 100_000
    return fake


@pytest.mark.parametrize("every", [0, 500])
async def test_states_that_depend_on_the_company(tmp_path: Path, every: int) -> None:
    run = sglang_run(tmp_path, canary_every=every)

    async def partial_sums_in_company(call: Call) -> web.StreamResponse:
        alone = len([c for c in call.server.current if c.rid.row is None]) == 1
        return await later(0.05, _rows(0 if alone else OTHER_ROWS))(call)

    async with sglang(run) as fake:
        fake.on(partial_sums_in_company, probes=True)
        end = await run.work(server_url=fake.url)
        assert all(call.rid.row is None for call in fake.calls)
    assert end.code == ExitCode.SERVER
    assert "a prompt of 500 tokens, alone and in a batch of 3,500, gets other states" in end.sentence
    assert "--enforce-disable-flashinfer-allreduce-fusion" in end.sentence
    assert run.attempts() == [0] * N


async def test_a_server_that_is_the_same_in_company(tmp_path: Path) -> None:
    run = sglang_run(tmp_path, canary_every=7)

    async def last_bits(call: Call) -> web.StreamResponse:
        return await _rows(len(call.server.calls) % 2)(call)

    async with sglang(run) as fake:
        fake.on(last_bits, probes=True)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    (preflight,) = values(run, "preflight")
    assert preflight["agreement"]["others"] == 6
    assert 0 < preflight["agreement"]["in_company"]["median_error"] < 0.02
    assert len(run.events("canary")) >= 3
    assert run.in_root() == []


def _rows(noise: int) -> Behaviour:
    async def answer(call: Call) -> web.StreamResponse:
        call.publish(noise=noise)
        return call.reply()

    return answer
