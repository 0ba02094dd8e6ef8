"""`adopt` on runs that are there already: every kind of file, every refusal, kills in the middle; no server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hsjournal.errors import ExitCode, JournalLockedError, UsageError
from hsjournal.journal.locks import Lock
from hsjournal.ops.adopt import Adoption, Report, adopt
from hsjournal.ops.subset import Subset
from hsjournal.ops.verify import verify
from hsjournal.states import State
from hsjournal.watch.supervisor import Job
from tests.helpers.cli import hsjournal
from tests.helpers.foreign import (
    States,
    as_angelslim,
    as_incident,
    as_modelopt,
    as_specforge,
    as_torchspec,
    random_states,
    same,
    save,
    save_folder,
    save_speculators,
    snapshot,
)
from tests.helpers.runs import LAYERS, MadeRun, make_run


def no_job() -> Job:
    raise AssertionError("no server is needed here")


def take(run: MadeRun, outputs: Path, **options: Any) -> Report:
    return adopt(run.paths, Adoption(outputs, **{"layers": LAYERS, **options}), no_job)


def states_of(run: MadeRun, row: int, **options: Any) -> States:
    return random_states(run.ids[row], seed=row, **options)


def refusals(report: Report) -> dict[str, str]:
    return {Path(r.path).name: r.reason for r in report.findings.refused}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    return folder


def test_every_layout_of_the_field_is_taken_by_its_token_ids(tmp_path: Path, sources: Path) -> None:
    run = make_run(tmp_path, [State.PENDING] * 8)
    made = {row: states_of(run, row) for row in range(6)}
    # The names and their order say nothing: row 0's states lie in data_5, and so on.
    save(sources / "rows_0-2000" / "data_5.ckpt", as_specforge(made[0]))
    save(sources / "sample_000001.pt", as_incident(made[1]))
    save(sources / "samples" / "ab12.pt", as_torchspec(made[2]))
    save(sources / "rows_0-5000" / "data_0.ckpt", as_angelslim(made[3]))
    save(sources / "c1.pt", as_modelopt(made[4]))
    save_folder(sources / "req_7", made[5])
    save(sources / "vocab_mapping" / "vocab_mapping.pt", {"d2t": torch.arange(4), "t2d": torch.ones(4).bool()})
    (sources / "log.txt").write_text("not a sample")
    before = snapshot(sources)
    report = take(run, sources)
    assert report.exit_code is ExitCode.DONE, report.findings
    assert report.to_json()["adopted"] == 6
    assert report.findings.ignored == 2
    assert report.left == 2
    assert run.states() == {**dict.fromkeys(range(6), "verified"), 6: "pending", 7: "pending"}
    for row, states in made.items():
        assert same(run.outputs()[row], states), row
    assert snapshot(sources) == before
    entered = run.row(0)
    assert (entered["actor"], entered["attempt"]) == ("adopt", 0)
    assert entered["server"] == (sources / "rows_0-2000" / "data_5.ckpt").as_uri()
    assert run.events("adopting")[0]["layers_stated"] == list(LAYERS)
    sound = verify(run.paths, Subset(), seed=0)
    assert (sound.checked, sound.damaged, sound.strangers.count) == (6, [], 0)


def test_a_second_time_changes_nothing(tmp_path: Path, sources: Path) -> None:
    run = make_run(tmp_path, [State.PENDING] * 3)
    for row in range(2):
        save(sources / f"{row}.pt", as_specforge(states_of(run, row)))
    take(run, sources)
    files, rows = snapshot(run.out), [run.row(row) for row in range(3)]
    again = take(run, sources).to_json()
    assert (again["adopted"], again["already"], again["left"]) == (0, 2, 1)
    assert (snapshot(run.out), [run.row(row) for row in range(3)]) == (files, rows)


def test_equal_prompts_and_equal_files_each_once(tmp_path: Path, sources: Path) -> None:
    ids = random_ids_of(11)
    run = make_run(tmp_path, [State.PENDING] * 4, ids={0: ids, 2: ids, 3: ids})
    for name, seed in (("a.pt", 1), ("data_3.ckpt", 2)):
        save(sources / name, as_specforge(random_states(ids, seed=seed)))
    first = take(run, sources)
    assert first.to_json()["adopted"] == 2
    # data_3 names row 3; a.pt gets the lowest of the others, and row 2 is left to do
    assert run.states() == {0: "verified", 1: "pending", 2: "pending", 3: "verified"}
    assert same(run.outputs()[3], random_states(ids, seed=2))
    save(sources / "b.pt", as_specforge(random_states(ids, seed=3)))
    save(sources / "c.pt", as_specforge(random_states(ids, seed=4)))
    second = take(run, sources).to_json()
    assert (second["adopted"], second["already"], second["not_needed"]) == (1, 2, 1)
    assert same(run.outputs()[2], random_states(ids, seed=3))


def random_ids_of(count: int) -> Any:
    from tests.helpers.dumps import random_ids

    return random_ids(count, seed=77)


def shorter(content: dict[str, Any]) -> None:
    content["hidden_state"] = content["hidden_state"][:, :-1].clone()


def two_layers(content: dict[str, Any]) -> None:
    content["aux_hidden_state"] = content["aux_hidden_state"][..., :128].clone()


def half_wide(content: dict[str, Any]) -> None:
    content["hidden_state"] = content["hidden_state"][..., :32].clone()
    content["aux_hidden_state"] = content["aux_hidden_state"][..., :96].clone()


def to_half(content: dict[str, Any]) -> None:
    for key in ("hidden_state", "aux_hidden_state"):
        content[key] = content[key].half()


def to_nan(content: dict[str, Any]) -> None:
    content["aux_hidden_state"][0, -1, -1] = float("nan")


def to_inf(content: dict[str, Any]) -> None:
    content["hidden_state"][0, 1, 3] = float("-inf")


def without_ids(content: dict[str, Any]) -> None:
    del content["input_ids"]


def pre_norm(content: dict[str, Any]) -> None:
    content["hidden_states_prenorm"] = True


def other_dtypes(content: dict[str, Any]) -> None:
    content["hidden_state"] = content["hidden_state"].float()


def is_view(content: dict[str, Any]) -> None:
    content["hidden_state"] = content["hidden_state"].transpose(1, 2).contiguous().transpose(1, 2)


def swapped_axes(content: dict[str, Any]) -> None:
    content["hidden_state"] = content["hidden_state"].transpose(1, 2).contiguous()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (shorter, "wrong_count"),
        (two_layers, "wrong_layers"),
        (half_wide, "wrong_hidden"),
        (to_half, "wrong_dtype"),
        (other_dtypes, "wrong_dtype"),
        (to_nan, "not_finite"),
        (to_inf, "not_finite"),
        (without_ids, "no_ids"),
        (pre_norm, "wrong_norm"),
        (is_view, "unreadable"),
        (swapped_axes, "wrong_count"),
    ],
)
def test_what_is_wrong_is_refused_with_its_reason(
    tmp_path: Path, sources: Path, harm: Callable[[dict[str, Any]], None], reason: str
) -> None:
    run = make_run(tmp_path, [State.PENDING] * 2)
    content = as_specforge(states_of(run, 0))
    harm(content)
    save(sources / "bad.pt", content)
    save(sources / "good.pt", as_specforge(states_of(run, 1)))
    report = take(run, sources)
    assert refusals(report) == {"bad.pt": reason}
    assert report.exit_code is ExitCode.FAILED_SAMPLES
    assert run.states() == {0: "pending", 1: "verified"}
    assert list(run.outputs()) == [1]


def test_a_refused_file_leaves_its_row_to_the_next(tmp_path: Path, sources: Path) -> None:
    run = make_run(tmp_path, [State.PENDING])
    content = as_specforge(states_of(run, 0))
    to_half(content)
    save(sources / "a.pt", content)
    save(sources / "b.pt", as_specforge(states_of(run, 0)))
    assert refusals(take(run, sources)) == {"a.pt": "wrong_dtype"}
    assert run.states() == {0: "verified"}


def test_broken_and_hostile_files(tmp_path: Path, sources: Path) -> None:
    run = make_run(tmp_path, [State.PENDING] * 2)
    good = save(tmp_path / "good.pt", as_specforge(states_of(run, 0)))
    data = good.read_bytes()
    for name, body in {
        "empty.pt": b"",
        "one.pt": data[:1],
        "half.pt": data[: len(data) // 2],
        "less.pt": data[:-1],
        "more.pt": data + b"x",
        "old.pt": b"\x80\x02\x8a\nl\xfc",
        "zipped.ckpt.gz": b"\x1f\x8b" + data,
    }.items():
        (sources / name).write_bytes(body)

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/owned",)

    save(sources / "evil.pt", {"input_ids": torch.arange(3), "hidden_state": Evil()})
    (sources / "loop.pt").symlink_to(sources / "loop.pt")
    os.mkfifo(sources / "fifo.pt")
    report = take(run, sources)
    names = {"empty", "one", "half", "less", "more", "old", "evil", "loop", "fifo"}
    assert refusals(report) == {f"{n}.pt": "unreadable" for n in names} | {"zipped.ckpt.gz": "unreadable"}
    assert not (tmp_path / "owned").exists()
    assert set(run.states().values()) == {"pending"}


def test_files_that_match_no_prompt_are_left(tmp_path: Path, sources: Path) -> None:
    run = make_run(tmp_path, [State.PENDING])
    save(sources / "cut.pt", as_specforge(random_states(run.ids[0][:-1])))
    save(sources / "other.pt", as_specforge(random_states([5, 6, 7])))
    report = take(run, sources)
    assert sorted(Path(p).name for p in report.findings.unmatched) == ["cut.pt", "other.pt"]
    assert report.exit_code is ExitCode.DONE
    assert run.states() == {0: "pending"}


def test_rows_that_are_not_pending_are_left_with_the_reason(tmp_path: Path, sources: Path) -> None:
    run = make_run(tmp_path, [State.FAILED, State.SENT, State.VERIFIED, State.PENDING])
    for row in range(4):
        save(sources / f"{row}.pt", as_specforge(states_of(run, row)))
    before = run.outputs()[2].read_bytes()
    report = take(run, sources)
    assert refusals(report) == {"0.pt": "row_failed", "1.pt": "under_way"}
    assert report.to_json()["not_needed"] == 1
    assert run.states() == {0: "failed", 1: "sent", 2: "verified", 3: "verified"}
    assert run.outputs()[2].read_bytes() == before


def test_speculators_pre_norm_file_is_read_and_refused_by_a_post_norm_run(tmp_path: Path, sources: Path) -> None:
    run = make_run(tmp_path, [State.PENDING] * 2)
    save_speculators(sources / "hs_0.safetensors", states_of(run, 0))
    assert refusals(take(run, sources)) == {"hs_0.safetensors": "wrong_norm"}
    text = run.paths.manifest.read_text()
    run.paths.manifest.write_text(text.replace('final_norm = "post"', 'final_norm = "pre"'))
    assert take(run, sources).to_json()["adopted"] == 1
    assert same(run.outputs()[0], states_of(run, 0))


def test_files_of_an_earlier_hsjournal_prove_their_layers_and_digests(tmp_path: Path) -> None:
    earlier = make_run(tmp_path / "earlier", [State.VERIFIED] * 4)
    run = make_run(tmp_path / "now", [State.PENDING] * 4, ids=earlier.ids)
    flipped = earlier.outputs()[1]
    data = bytearray(flipped.read_bytes())
    data[1000] ^= 4
    flipped.write_bytes(data)
    report = take(run, earlier.out, layers=None)  # nothing is stated, and nothing need be compared
    assert refusals(report) == {"data_1.ckpt": "damaged"}
    assert run.states() == {0: "verified", 1: "pending", 2: "verified", 3: "verified"}
    assert run.row(0)["source_xxh3"] == earlier.row(0)["source_xxh3"]


def test_unproven_layers_need_somebody_who_vouches(tmp_path: Path, sources: Path) -> None:
    run = make_run(tmp_path, [State.PENDING])
    save(sources / "a.pt", as_specforge(states_of(run, 0)))
    with pytest.raises(UsageError, match="which layers"):
        take(run, sources, layers=None, compare=0)
    with pytest.raises(UsageError, match="the run captures"):
        take(run, sources, layers=(2, 4, 6))
    assert run.states() == {0: "pending"}
    assert not run.outputs()


def test_linked_files_share_their_bytes_and_stay_verifiable(tmp_path: Path, sources: Path) -> None:
    run = make_run(tmp_path, [State.PENDING] * 3)
    save(sources / "a.ckpt", as_specforge(states_of(run, 0)))
    save(sources / "b.pt", as_incident(states_of(run, 1)))  # can't stay as it is: it is converted
    other_mask = as_specforge(states_of(run, 2))
    other_mask["loss_mask"][0] ^= 1
    save(sources / "c.ckpt", other_mask)
    before = snapshot(sources)
    report = take(run, sources, link=True).to_json()
    assert report["how"] in ({"linked": 1, "converted": 2}, {"cloned": 1, "converted": 2})
    assert snapshot(sources) == before
    for row in range(3):
        assert same(run.outputs()[row], states_of(run, row))
    if "linked" in report["how"]:
        assert run.outputs()[0].stat().st_ino == (sources / "a.ckpt").stat().st_ino
    assert verify(run.paths, Subset(), seed=0).exit_code is ExitCode.DONE
    data = bytearray(run.outputs()[0].read_bytes())
    data[700] ^= 1
    os.unlink(run.outputs()[0])
    (run.out / "rows_0-2000" / "data_0.ckpt").write_bytes(data)
    (damaged,) = verify(run.paths, Subset(), seed=0, repair=True).damaged
    assert (damaged.row, damaged.kind) == (0, "wrong_digest")
    shutil.copy(run.outputs()[1], tmp_path / "spare")
    assert take(run, sources, link=True).to_json()["adopted"] == 1
    shutil.copy(tmp_path / "spare", run.outputs()[0])  # another sample's content, in a file that was taken as it is
    assert [d.row for d in verify(run.paths, Subset(), seed=0).damaged] == [0]


def test_in_place_nothing_is_rewritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = make_run(tmp_path, [State.PENDING] * 4, out=out)
    folder = out / "rows_0-2000"
    save(folder / "data_0.ckpt", as_specforge(states_of(run, 0)))
    save(folder / "data_3.ckpt", as_specforge(states_of(run, 1)))  # under another row's name
    save(folder / "data_2.ckpt", as_incident(states_of(run, 2)))  # would have to be changed
    before = snapshot(out)
    report = take(run, out)
    assert report.to_json()["how"] == {"in_place": 1}
    assert refusals(report) == {"data_3.ckpt": "wrong_place", "data_2.ckpt": "wrong_place"}
    assert snapshot(out) == before
    assert run.states() == {0: "verified", 1: "pending", 2: "pending", 3: "pending"}
    assert verify(run.paths, Subset(), seed=0).damaged == []
    again = take(run, out).to_json()
    assert (again["already"], again["adopted"]) == (1, 0)


def test_folders_within_one_another_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.PENDING])
    for outputs in (run.paths.run_dir, run.out / "rows"):
        outputs.mkdir(exist_ok=True)
        with pytest.raises(UsageError, match="within one another"):
            take(run, outputs)
    with pytest.raises(UsageError, match="no folder"):
        take(run, tmp_path / "nowhere")


def test_refused_while_the_run_goes_on(tmp_path: Path, sources: Path) -> None:
    run = make_run(tmp_path, [State.PENDING])
    for path in (run.paths.supervisor_lock, run.paths.worker_lock):
        lock = Lock(path)
        lock.acquire()
        with pytest.raises(JournalLockedError):
            take(run, sources)
        lock.release()


KILLS = (
    "sink.opened=kill@2",
    "sink.synced=kill@3",
    "sink.linked=kill@1",
    "sink.published=kill@4",
    "verify.reading=kill@2",
    "verify.done=kill@3",
    "journal.committing=kill@4",
    "journal.committing=kill@6",
)


@pytest.mark.parametrize("link", [False, True], ids=["converted", "linked"])
def test_killed_anywhere_and_begun_again_it_ends_the_same(tmp_path: Path, sources: Path, link: bool) -> None:
    rows = 12
    run = make_run(tmp_path, [State.PENDING] * (rows + 1))
    for row in range(rows):
        save(sources / f"{row:02}.ckpt", as_specforge(states_of(run, row)))
    before = snapshot(sources)
    command: list[str | Path] = [
        "adopt",
        run.paths.run_dir,
        "--outputs",
        sources,
        "--layers-checked",
        "1,3,5",
        "--json",
    ]
    if link:
        command.append("--link")
    verified: dict[int, tuple[int, int]] = {}
    kills = 0
    for fault in KILLS:
        killed = hsjournal(*command, HSJOURNAL_FAULTS=fault)
        assert killed.code in (-9, 0), killed
        kills += killed.code == -9
        states = run.states()
        assert set(states.values()) <= {"pending", "written", "verified"}
        for row, file in run.outputs().items():
            if states[row] == "verified":
                stat = file.stat()
                assert verified.setdefault(row, (stat.st_ino, stat.st_mtime_ns)) == (stat.st_ino, stat.st_mtime_ns)
    assert kills >= len(KILLS) // 2
    last = hsjournal(*command)
    assert last.code == 0, last
    found = last.json()
    assert found["adopted"] + found["already"] == rows
    assert found["left"] == 1
    assert run.states() == {**dict.fromkeys(range(rows), "verified"), rows: "pending"}
    for row in range(rows):
        assert same(run.outputs()[row], states_of(run, row))
    assert snapshot(sources) == before
    assert [p.name for p in run.out.rglob(".*")] == []
    assert verify(run.paths, Subset(), seed=0).exit_code is ExitCode.DONE


def test_a_full_disk_stops_it_and_it_goes_on(tmp_path: Path, sources: Path) -> None:
    run = make_run(tmp_path, [State.PENDING] * 4)
    for row in range(4):
        save(sources / f"{row}.ckpt", as_specforge(states_of(run, row)))
    command: list[str | Path] = ["adopt", run.paths.run_dir, "--outputs", sources, "--layers-checked", "1,3,5"]
    full = hsjournal(*command, HSJOURNAL_FAULTS="sink.written=errno:ENOSPC")
    assert full.code == 5, full
    assert "is full" in full.err
    assert "Traceback" not in full.err
    done = hsjournal(*command)
    assert done.code == 0, done
    assert "adopted 4" in done.out
    assert set(run.states().values()) == {"verified"}


def test_the_command_says_what_is_wrong(tmp_path: Path, sources: Path) -> None:
    run = make_run(tmp_path, [State.PENDING] * 2)
    save(sources / "a.pt", as_specforge(states_of(run, 0)))
    bad = as_specforge(states_of(run, 1))
    to_nan(bad)
    save(sources / "bad.pt", bad)
    run_dir = run.paths.run_dir
    done = hsjournal("adopt", run_dir, "--outputs", sources, "--layers-checked", "1,3,5")
    assert done.code == 3, done
    assert "REFUSED" in done.out
    assert "not_finite" in done.out
    assert "as you stated" in done.out
    assert f"1 rows are left to do; go on with: hsjournal resume {run_dir}" in done.out
    other = hsjournal("adopt", run_dir, "--outputs", sources, "--layers-checked", "2,4,6")
    assert (other.code, "0-based" in other.err) == (2, True)
    nowhere = hsjournal("adopt", tmp_path / "new", "--outputs", sources)
    assert nowhere.code == 10
    assert not (tmp_path / "new").exists()
