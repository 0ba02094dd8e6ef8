"""``--verify``: what is read back at once, what later, and that the journal says which. The real worker, a scripted server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hsjournal.errors import ExitCode
from hsjournal.journal.gate import pass_gate
from hsjournal.ops.subset import Subset
from hsjournal.ops.verify import verify
from hsjournal.sink.policy import ReadBackPolicy
from hsjournal.ui.status import status_text
from hsjournal.watch.status import status
from tests.helpers.fake_server import FakeServer
from tests.helpers.worker_runs import Run, collected  # noqa: F401

LENGTHS = (20, 33, 7, 64, 12, 5)


async def finished(tmp_path: Path, how: str) -> Run:
    """A run whose worker has ended well, reading back as ``how`` says."""
    async with FakeServer(tmp_path / "root") as server:
        options = {"handover_root": str(tmp_path / "root")}
        run = Run(tmp_path, LENGTHS, url=server.url, manifest={"options": options}, verify=how)
        end = await run.work()
    assert (end.code, end.sentence) == (ExitCode.DONE, "")
    assert run.in_root() == [], "the dumps are released"
    assert len(run.outputs()) == len(LENGTHS)
    return run


async def test_deferred_rows_stay_written_until_verify_completes_them(tmp_path):
    run = await finished(tmp_path, "deferred")
    assert {(r["state"], r["verify_method"], r["verified_at"]) for r in run.rows()} == {("written", "deferred", None)}
    told = status(run.paths)
    assert (told["complete"], told["deferred"]) == (True, len(LENGTHS))
    assert "not read back" in status_text(told)
    report = verify(run.paths, Subset.parse(""), seed=0)
    assert (report.completed, report.damaged, report.exit_code) == (len(LENGTHS), [], ExitCode.DONE)
    assert {r["verify_method"] for r in run.rows()} <= {"direct", "dropped", "memory"}
    run.assert_all_verified()
    assert verify(run.paths, Subset.parse(""), seed=0).completed == 0
    assert status(run.paths)["deferred"] == 0


async def test_a_damaged_file_stays_deferred_until_it_is_repaired(tmp_path):
    run = await finished(tmp_path, "deferred")
    path = run.paths.default_out / run.row(3)["output_path"]
    with path.open("r+b") as file:
        file.seek(2000)
        file.write(bytes(b ^ 1 for b in os.pread(file.fileno(), 1, 2000)))
    report = verify(run.paths, Subset.parse(""), seed=0)
    assert [d.row for d in report.damaged] == [3]
    assert report.exit_code is ExitCode.FAILED_SAMPLES
    assert report.completed == len(LENGTHS) - 1
    assert (run.row(3)["state"], run.row(3)["verify_method"]) == ("written", "deferred")
    assert verify(run.paths, Subset.parse(""), seed=0, repair=True).to_json()["repaired"] == 1
    assert run.row(3)["state"] == "pending"
    async with FakeServer(run.root) as server:
        assert (await run.work(server_url=server.url)).code == ExitCode.DONE
    assert run.row(3)["verify_method"] == "deferred"


async def test_a_share_is_read_back_and_the_same_rows_each_time(tmp_path):
    run = await finished(tmp_path, "sample:50%")
    policy = ReadBackPolicy.parse("sample:0.5")
    read = [policy.reads(run.manifest.run_id, row) for row in range(len(LENGTHS))]
    assert [r["state"] == "verified" for r in run.rows()] == read
    assert 0 < sum(read) < len(LENGTHS), "both kinds are seen here"


async def test_a_worker_that_reads_everything_back_completes_what_was_put_off(tmp_path):
    run = await finished(tmp_path, "deferred")
    end = await run.work(verify="full")  # no server is needed for it
    assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()


async def test_a_crash_is_not_blamed_on_rows_that_are_done_for_now(tmp_path):
    run = await finished(tmp_path, "deferred")
    answer = pass_gate(run.paths, run.paths.default_out, crashed=True, max_strikes=3)
    assert answer["in_flight"] == []
    assert {(r["suspect"], r["strikes"]) for r in run.rows()} == {(0, 0)}


@pytest.mark.parametrize("text", ["", "none", "sample", "sample:0", "sample:101%", "sample:x", "full:1"])
def test_what_is_no_policy_is_refused(text):
    with pytest.raises(ValueError, match="none of full, deferred, sample"):
        ReadBackPolicy.parse(text)
