"""FAULTS.md group A: a server that returns wrong, missing or extra hidden states. The real worker against a scripted server.

| fault | test |
|---|---|
| A1 | test_fewer_rows_on_a_warm_cache, test_a_probe_with_a_prefix_hit_ends_the_run (the cache's own flag: tests/unit/test_preflight_settings.py) |
| A2, A23 | test_swapped_dumps_of_equal_length, test_a_dump_under_another_requests_name (right digest, wrong rows: test_faults_canary.py) |
| A3 | test_states_of_the_previous_call (right digest, wrong rows: test_faults_canary.py) |
| A4 | test_speculative_decoding_is_refused |
| A5 | test_more_rows_than_tokens |
| A6 | test_only_the_last_chunk |
| A8 | test_another_chunk_size_on_resume |
| A9 | test_shifted_layer_ids_end_the_run |
| A10 | test_a_missing_aux_file, test_two_layers_instead_of_three_end_the_run |
| A11 | test_meta_without_the_norm, test_pre_norm_ends_the_run |
| A12 | test_swapped_axes |
| A13 | test_nan_in_the_last_row, test_nan_everywhere_ends_the_run |
| A14 | test_float16_ends_the_run, test_infinity |
| A15 | test_nan_at_certain_lengths_shows_as_one_bucket |
| A16 | test_a_server_that_cuts_prompts (lengths before sending: tests/integration/test_ingest.py) |
| A18 | test_a_dump_that_is_published_twice |
| A19 | test_directories_of_nobody |
| A20 | test_a_replay_need_not_have_the_same_bits |
| A21 | test_an_error_for_long_samples_only |
| A22 | test_the_answer_long_before_the_dump |
| A25 | test_tensors_of_different_lengths |
| B17 | test_malformed_meta |
| also | test_hostile_files_in_a_dump, test_a_dump_of_another_life_of_the_server |

Not here: protocol v1 (tests/integration/test_v1_job.py).
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from hsjournal.dump.protocol import FailureReason
from hsjournal.errors import ExitCode
from hsjournal.ui.status import status_text
from hsjournal.watch.status import status as status_of
from tests.helpers.fake_server import Call, FakeServer, dump, failure, good, later, status, until
from tests.helpers.worker_runs import HIDDEN, Run, collected  # noqa: F401

LENGTHS = (20, 33, 20, 64, 7)


def edit_meta(**changes: Any) -> Any:
    """Edit meta.json after it was written; None removes a key."""

    def edit(folder: Path) -> None:
        path = folder / "meta.json"
        meta = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in meta.items() if value is not None}))

    return edit


def write_meta(text: str) -> Any:
    """Replace meta.json."""
    return lambda folder: (folder / "meta.json").write_text(text)


def poke(file: str, row: int, bits: int) -> Any:
    """Put one bad value into a row of a tensor."""

    def edit(folder: Path) -> None:
        with (folder / file).open("r+b") as tensor:
            tensor.seek((row * HIDDEN + 3) * 2)
            tensor.write(np.uint16(bits).tobytes())

    return edit


async def rejected_once(tmp_path: Path, why: str, *, row: int = 1, **changes: Any) -> Run:
    """One bad dump for one row: refused with exactly this reason, one strike, replayed; all rows end verified."""
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(dump(**changes), row=row, attempt=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    (event,) = run.events("dump_rejected")
    assert (event.row, event.detail["why"]) == (row, why)
    assert run.strikes() == [int(number == row) for number in range(len(LENGTHS))]
    assert run.attempts() == [2 if number == row else 1 for number in range(len(LENGTHS))]
    run.assert_all_verified()
    (kept,) = run.paths.rejects.iterdir()  # set aside, outside the output
    assert (kept / "why.txt").read_text().strip() == why
    return run


async def ends_the_run(tmp_path: Path, **changes: Any) -> tuple[Run, str]:
    """One such dump ends the run with exit code 13; nothing is failed, no strike is given."""
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(dump(**changes), row=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.SERVER
    assert run.row(1)["state"] == "pending"
    assert run.strikes() == [0] * len(LENGTHS)
    assert "manifest.toml" in end.sentence
    return run, end.sentence


async def test_fewer_rows_on_a_warm_cache(tmp_path: Path) -> None:
    why = "wrong_count: the server returned 28 of 33 rows: the server cut the prompt to its context length, or a prefix cache hit"
    await rejected_once(tmp_path, why, num_tokens=28)


async def test_a_probe_with_a_prefix_hit_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(good, probes=True, times=1)
        fake.on(dump(num_tokens=3), probes=True)  # the second of two equal prompts
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.SERVER
    assert "a probe of 16 tokens came back with 3 rows" in end.sentence
    assert "--disable-radix-cache" in end.sentence
    assert run.attempts() == [0] * len(LENGTHS)


async def test_a_server_that_reports_a_prefix_hit(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(failure(FailureReason.PREFIX_HIT), row=2)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.SERVER
    assert "can't capture: prefix_hit" in end.sentence
    assert "--disable-radix-cache" in end.sentence
    assert run.strikes() == [0] * len(LENGTHS)


async def test_swapped_dumps_of_equal_length(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    waiting: dict[int, Call] = {}

    async def swap(call: Call) -> web.StreamResponse:
        assert call.rid.row is not None
        waiting[call.rid.row] = call
        await until(lambda: len(waiting) == 2)
        other = waiting[2 - call.rid.row]
        call.server.publish(other.ids, call.rid)  # right name, right count, the other's rows
        return call.reply()

    async with FakeServer(run.root) as fake:
        fake.on(swap, row=(0, 2), attempt=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    events = {event.row: event.detail["why"] for event in run.events("dump_rejected")}
    assert set(events) == {0, 2}
    assert all(
        why.startswith("wrong_identity: the digest of the token ids that were run is")
        and "rows of another request" in why
        for why in events.values()
    )
    assert run.strikes() == [1, 0, 1, 0, 0]
    run.assert_all_verified()


async def test_a_dump_under_another_requests_name(tmp_path: Path) -> None:
    why = "wrong_identity: meta.json in hsj-fa017run-1-1-33 speaks of 'hsj-fa017run-2-1-20': rows of another request"
    await rejected_once(tmp_path, why, edit=edit_meta(rid="hsj-fa017run-2-1-20"))


async def test_states_of_the_previous_call(tmp_path: Path) -> None:
    run = Run(tmp_path, (20, 20, 20))
    last: list[Call] = []

    async def previous(call: Call) -> web.StreamResponse:
        source = last[-1] if last else call
        last.append(call)
        call.server.publish(source.ids, call.rid)
        return call.reply()

    async with FakeServer(run.root) as fake:
        fake.on(previous, attempt=1, row=(0, 1, 2))
        end = await run.work(server_url=fake.url, max_in_flight=1)
    assert end.code == ExitCode.DONE, end.sentence
    assert sorted(event.row or 0 for event in run.events("dump_rejected")) == [1, 2]
    run.assert_all_verified()


async def test_speculative_decoding_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.info["speculative_algorithm"] = "EAGLE3"
        end = await run.work(server_url=fake.url)
        assert fake.calls == []
    assert end.code == ExitCode.SERVER
    assert "decodes speculatively (EAGLE3)" in end.sentence
    assert "--speculative-algorithm" in end.sentence


async def test_more_rows_than_tokens(tmp_path: Path) -> None:
    why = "wrong_count: the server returned 66 of 33 rows: a request that was retracted and prefilled twice, or a second BOS"
    await rejected_once(tmp_path, why, num_tokens=66)


async def test_only_the_last_chunk(tmp_path: Path) -> None:
    why = "wrong_count: the server returned 32 of 64 rows: a chunk of a chunked prefill is missing"
    await rejected_once(tmp_path, why, row=3, num_tokens=32, chunks=(0, 16))


async def test_another_chunk_size_on_resume(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.info["chunked_prefill_size"] = 8192
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.SERVER
    assert "chunk size is 8192, the run was made with 0" in end.sentence
    assert run.attempts() == [0] * len(LENGTHS)


async def test_shifted_layer_ids_end_the_run(tmp_path: Path) -> None:
    _, sentence = await ends_the_run(tmp_path, capture_layers=(2, 4, 6))
    assert (
        "captures something else than this run was made for: aux layers [2, 4, 6], the run's are [1, 3, 5]" in sentence
    )
    assert "off by one, the other convention" in sentence


async def test_shifted_layer_ids_give_exit_code_13(tmp_path: Path) -> None:
    run = Run(tmp_path, (20,))
    async with FakeServer(run.root) as fake:
        fake.on(dump(capture_layers=(2, 4, 6)), row=0)
        process = run.start_process(fake.url)
        output, _ = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == ExitCode.SERVER, output
    (event,) = run.events("worker_error")
    assert event.detail["exit_code"] == 13
    assert "off by one" in event.detail["why"]


async def test_two_layers_instead_of_three_end_the_run(tmp_path: Path) -> None:
    _, sentence = await ends_the_run(tmp_path, capture_layers=(1, 3))
    assert "aux layers [1, 3], the run's are [1, 3, 5]: 2 instead of 3" in sentence


async def test_a_missing_aux_file(tmp_path: Path) -> None:
    why = "malformed: 'aux_2.bin' is missing: 3 aux layers and a final state are due"
    await rejected_once(tmp_path, why, edit=lambda folder: (folder / "aux_2.bin").unlink())


async def test_meta_without_the_norm(tmp_path: Path) -> None:
    why = "malformed: meta.json: keys ['final_norm'] are missing or unknown"
    await rejected_once(tmp_path, why, edit=edit_meta(final_norm=None))


async def test_pre_norm_ends_the_run(tmp_path: Path) -> None:
    _, sentence = await ends_the_run(tmp_path, final_norm="pre")
    assert "the final state is pre-norm, the run's is post-norm" in sentence


async def test_swapped_axes(tmp_path: Path) -> None:
    def swap(folder: Path) -> None:
        path = folder / "meta.json"
        meta = json.loads(path.read_text())
        for tensor in meta["tensors"]:
            tensor["shape"].reverse()
        path.write_text(json.dumps(meta))

    why = "malformed: meta.json: tensors do not follow from num_tokens, hidden_size, dtype and capture_layers"
    await rejected_once(tmp_path, why, edit=swap)


async def test_nan_in_the_last_row(tmp_path: Path) -> None:
    why = "not_finite: final.bin holds NaN or infinity: 1 values in 1 of 33 rows, the first in row 32"
    run = await rejected_once(tmp_path, why, edit=poke("final.bin", 32, 0x7FC1))
    assert all(not name.rsplit("/")[-1].startswith(".") for name in run.outputs())


async def test_infinity(tmp_path: Path) -> None:
    why = "not_finite: aux_1.bin holds NaN or infinity: 1 values in 1 of 33 rows, the first in row 0"
    await rejected_once(tmp_path, why, edit=poke("aux_1.bin", 0, 0xFF80))


async def test_nan_everywhere_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(good, probes=True, times=2)  # the preflight still goes well
        fake.on(later(0.2, dump(edit=poke("aux_0.bin", 2, 0x7FC0))), probes=True)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.SERVER
    assert "a probe came back with NaN or infinity in aux_0.bin" in end.sentence
    assert run.strikes() == [0] * len(LENGTHS)


async def test_nan_at_certain_lengths_shows_as_one_bucket(tmp_path: Path) -> None:
    lengths = (65, 20, 129, 33, 193, 64)
    run = Run(tmp_path, lengths)
    async with FakeServer(run.root) as fake:
        for row in (0, 2, 4):
            fake.on(dump(edit=poke("final.bin", 0, 0x7FC0)), row=row)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.FAILED_SAMPLES
    state = status_of(run.paths)
    assert state["failures"] == [{"reason": "not_finite", "rows": 3, "length_mod_64": {"1": 3}}]
    assert "3 x not_finite, all of a length that leaves 1 when divided by 64" in status_text(state)
    run.assert_all_verified(but=[0, 2, 4])


async def test_float16_ends_the_run(tmp_path: Path) -> None:
    _, sentence = await ends_the_run(tmp_path, dtype="float16")
    assert "rows are float16, the run's are bfloat16" in sentence


async def test_another_width_ends_the_run(tmp_path: Path) -> None:
    _, sentence = await ends_the_run(tmp_path, hidden_size=16)
    assert "rows are 16 wide, the run's 8: another model is served" in sentence


@pytest.mark.parametrize("order", ["answer first", "dump first"])
async def test_a_server_that_cuts_prompts(tmp_path: Path, order: str) -> None:
    run = Run(tmp_path, LENGTHS, dump_timeout=5.0)
    published = asyncio.Event()

    async def cutting(call: Call) -> web.StreamResponse:
        if order == "dump first":
            call.publish()
            published.set()
            await asyncio.sleep(0.1)
        else:
            call.server.soon(publish_later(call))
        return call.reply(prompt_tokens=len(call.ids) - 7)

    async def publish_later(call: Call) -> None:
        await asyncio.sleep(0.2)
        call.publish()
        published.set()

    async def after_it(call: Call) -> web.StreamResponse:
        await published.wait()  # else the run may be over before it comes
        call.publish()
        return call.reply()

    async with FakeServer(run.root) as fake:
        fake.on(cutting, row=3, attempt=1)
        fake.on(after_it, row=3)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    (event,) = run.events("dump_rejected")
    assert event.detail["why"] == (
        "wrong_count: the server says that it ran 57 of the 64 tokens sent: cut near its context limit?"
    )
    assert run.strikes() == [0, 0, 0, 1, 0]
    run.assert_all_verified()


async def test_a_dump_that_is_published_twice(tmp_path: Path) -> None:
    run = Run(tmp_path, (*LENGTHS, 30, 31, 32), sample_timeout=30.0, read_timeout=30.0)

    async def twice(call: Call) -> web.StreamResponse:
        call.publish()
        call.server.soon(again(call))
        return call.reply()

    copies: list[int | None] = []

    async def again(call: Call) -> None:
        await until(lambda: str(call.rid) not in run.in_root())
        call.publish()
        copies.append(call.rid.row)

    async def slow(call: Call) -> web.StreamResponse:
        await until(lambda: len(copies) == 2)
        return await good(call)

    async with FakeServer(run.root) as fake:
        fake.on(twice, row=(0, 1))
        fake.on(slow, row=7)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()  # one file each, and nothing left in the root
    dropped = [(e.row, e.detail["why"]) for e in run.events("dump_removed")]
    assert sorted(dropped) == [(0, "its row is verified"), (1, "its row is verified")]
    assert run.strikes() == [0] * 8


async def test_directories_of_nobody(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    foreign = ("req_22391", "psm_x", "vllm_x", "hsj-0ther-1-1-20", "..evil", "hsj-fa017run-1-1")
    for name in foreign:
        (run.root / name).mkdir()
        (run.root / name / "done").touch()
    (run.root / "sem.mp").write_text("x")

    async def between(call: Call) -> web.StreamResponse:
        (call.server.root / f"HEALTH_CHECK_{call.rid.row}").mkdir()
        return await good(call)

    async with FakeServer(run.root) as fake:
        fake.on(between)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.states() == ["verified"] * len(LENGTHS)
    checks = [f"HEALTH_CHECK_{row}" for row in range(len(LENGTHS))]
    assert run.in_root() == sorted([*foreign, *checks, "sem.mp"])
    (event,) = run.events("reconciled_root")
    assert set(event.detail["foreign"]) == {*foreign, "sem.mp"}


async def test_a_replay_need_not_have_the_same_bits(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)

    async def noisy(call: Call) -> web.StreamResponse:
        first = call.rid.attempt == 1
        call.publish(noise=int(not first), num_tokens=len(call.ids) - first)
        return call.reply()

    async with FakeServer(run.root) as fake:
        fake.on(noisy, row=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.states() == ["verified"] * len(LENGTHS)
    for row in (0, 2, 3, 4):
        run.assert_whole(row)


async def test_an_error_for_long_samples_only(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(status(500, "CUDA out of memory"), row=3)
        end = await run.work(server_url=fake.url)
        assert len(fake.rids(3)) == 3
    assert end.code == ExitCode.FAILED_SAMPLES
    row = run.row(3)
    assert (row["state"], row["strikes"], row["attempt"]) == ("failed", 3, 3)
    assert row["reason"] == 'the server answered 500: {"error": {"message": "CUDA out of memory"}}'
    run.assert_all_verified(but=[3])


async def test_the_answer_long_before_the_dump(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)

    async def early(call: Call) -> web.StreamResponse:
        call.server.soon(slow_writer(call))
        return call.reply()

    async def slow_writer(call: Call) -> None:
        tmp = call.publish(publish=False).path
        done = (tmp / "done").rename(tmp.parent / "done.away")
        await asyncio.sleep(0.8)
        assert not (call.server.root / str(call.rid)).exists()
        done.rename(tmp / "done")
        tmp.rename(call.server.root / str(call.rid))

    async with FakeServer(run.root) as fake:
        fake.on(early, row=1)
        end = await run.work(server_url=fake.url, dump_timeout=5.0)
        assert fake.aborted == []
    assert end.code == ExitCode.DONE, end.sentence
    assert run.strikes() == [0] * len(LENGTHS)
    assert run.attempts() == [1] * len(LENGTHS)
    run.assert_all_verified()


async def test_tensors_of_different_lengths(tmp_path: Path) -> None:
    def shorten(folder: Path) -> None:
        os.truncate(folder / "final.bin", 32 * HIDDEN * 2)

    why = "wrong_size: final.bin is 512 bytes (32.00 rows), not 528 (33 rows)"
    await rejected_once(tmp_path, why, edit=shorten)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"num_tokens":NaN}', "malformed: meta.json: NaN is not JSON"),
        ('{"num_tokens":33,"num_tokens":34}', "malformed: meta.json: a key stands twice"),
        ("[" * 100_000, "malformed: meta.json: nested too deeply"),
        ("[]", "malformed: meta.json: not a JSON object"),
        ('{"schema":"hsjournal/v3"}', "malformed: meta.json: schema is 'hsjournal/v3', not 'hsjournal/v2'"),
        (" " * (1 << 20) + "{}", "malformed: meta.json is 1,048,578 bytes long, more than 1,048,576"),
    ],
)
async def test_malformed_meta(tmp_path: Path, text: str, why: str) -> None:
    await rejected_once(tmp_path, why, edit=write_meta(text))


async def test_no_done_in_a_published_dump(tmp_path: Path) -> None:
    await rejected_once(tmp_path, "malformed: done is missing", edit=lambda folder: (folder / "done").unlink())


def _link_file(folder: Path) -> None:
    (folder / "aux_1.bin").unlink()
    (folder / "aux_1.bin").symlink_to("/etc/passwd")


def _fifo(folder: Path) -> None:
    (folder / "aux_1.bin").unlink()
    os.mkfifo(folder / "aux_1.bin")


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (_link_file, "unsafe: aux_1.bin is a link or a special file"),
        (_fifo, "unsafe: aux_1.bin is not a regular file"),
    ],
)
async def test_hostile_files_in_a_dump(tmp_path: Path, edit: Any, why: str) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(dump(edit=edit), row=1, attempt=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    (event,) = run.events("dump_rejected")
    assert (event.row, event.detail["why"]) == (1, why)
    assert run.states() == ["verified"] * len(LENGTHS)
    assert len(run.outputs()) == len(LENGTHS)
    # What is no regular file is never unlinked: it stays behind, told.
    assert run.in_root() == ["hsj-fa017run-1-1-33"]
    assert run.events("cleanup_failed", row=1)


@pytest.mark.parametrize("kind", ["link", "file"])
async def test_no_directory_where_the_dump_should_be(tmp_path: Path, kind: str) -> None:
    run = Run(tmp_path, LENGTHS)
    elsewhere = tmp_path / "elsewhere"

    async def strange(call: Call) -> web.StreamResponse:
        name = call.server.root / str(call.rid)
        if kind == "link":
            call.server.root = elsewhere
            elsewhere.mkdir()
            call.publish()
            call.server.root = run.root
            name.symlink_to(elsewhere / str(call.rid))
        else:
            name.write_text("x")
        return call.reply()

    async with FakeServer(run.root) as fake:
        fake.on(strange, row=1, attempt=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    (event,) = run.events("dump_rejected")
    assert event.detail["why"] == "unsafe: hsj-fa017run-1-1-33 is a link or a file, not a directory"
    assert run.strikes() == [0, 1, 0, 0, 0]
    assert run.states() == ["verified"] * len(LENGTHS)
    assert run.in_root() == ["hsj-fa017run-1-1-33"]  # not a directory of ours: left alone
    assert not elsewhere.exists() or len(os.listdir(elsewhere / "hsj-fa017run-1-1-33")) == 6


async def test_a_dump_of_another_life_of_the_server(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(dump(boot_id="life-0"), row=1, attempt=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    (event,) = run.events("sent_back", row=1)
    assert event.detail["why"] == (
        "stale_boot: written by server life 'life-0', asked was 'life-1': the server restarted"
    )
    assert run.strikes() == [0] * len(LENGTHS)
    run.assert_all_verified()


async def test_always_a_wrong_dump_for_one_sample(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(dump(num_tokens=34), row=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.FAILED_SAMPLES
    row = run.row(1)
    assert (row["state"], row["strikes"], row["attempt"]) == ("failed", 3, 3)
    assert row["reason"].startswith("wrong_count: the server returned 34 of 33 rows")
    run.assert_all_verified(but=[1])
