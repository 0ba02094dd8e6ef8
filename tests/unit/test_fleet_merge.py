"""What counts of many run directories, what is refused by name, and the one index that comes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hsjournal.errors import ExitCode, HsjournalError, NoJournalError, UsageError
from hsjournal.fleet.merge import merge
from hsjournal.fleet.numbers import LinkedNumbers
from hsjournal.fleet.survey import check, survey
from hsjournal.ops.subset import Subset
from hsjournal.states import State
from tests.helpers.fleets import index_of
from tests.helpers.shard_runs import make_shard

EVEN, ODD = [0, 2, 4], [1, 3]


@pytest.fixture
def both(tmp_path: Path) -> list[Path]:
    return [make_shard(tmp_path / "a", "1/2", EVEN), make_shard(tmp_path / "b", "2/2", ODD)]


def test_the_index_has_each_row_once_in_order_with_its_file(tmp_path: Path, both: list[Path]):
    done = merge(both, tmp_path / "index.jsonl")
    lines = index_of(tmp_path / "index.jsonl")
    assert [(line["row"], line["id"]) for line in lines] == [(row, f"s{row}") for row in range(5)]
    assert all(Path(line["file"]).stat().st_size == line["bytes"] for line in lines)
    assert all(line["file"].startswith(str(both[line["row"] % 2])) for line in lines)
    assert (done.samples, done.rows, done.exit_code) == (5, 5, ExitCode.DONE)


def test_a_folder_of_run_directories_may_be_named(tmp_path: Path, both: list[Path]):
    assert merge([tmp_path], tmp_path / "index.jsonl").samples == 5


def test_the_highest_incarnation_counts_and_the_others_are_named(tmp_path: Path, both: list[Path]):
    newer = make_shard(tmp_path / "c", "1/2", EVEN, incarnation=2)
    done = merge([*both, newer], tmp_path / "index.jsonl")
    assert done.passed_over == (str(both[0]),)
    assert not [line for line in index_of(tmp_path / "index.jsonl") if line["file"].startswith(str(both[0]))]


def test_what_an_older_start_does_meanwhile_changes_nothing(tmp_path: Path, both: list[Path]):
    newer = make_shard(tmp_path / "c", "1/2", EVEN, incarnation=2)
    merge([*both, newer], tmp_path / "before.jsonl")
    shutil.rmtree(both[0] / "out")
    (both[0] / "journal.db").write_bytes(b"overwritten by whoever still lives")
    merge([*both, newer], tmp_path / "after.jsonl")
    assert (tmp_path / "before.jsonl").read_bytes() == (tmp_path / "after.jsonl").read_bytes()


def test_the_same_incarnation_twice_is_refused_by_name(tmp_path: Path, both: list[Path]):
    copy = tmp_path / "copy"
    shutil.copytree(both[0], copy)
    with pytest.raises(UsageError, match="twice") as error:
        merge([*both, copy], tmp_path / "index.jsonl")
    assert str(copy) in error.value.message
    assert str(both[0]) in error.value.message
    assert not (tmp_path / "index.jsonl").exists()


def test_a_newer_start_that_is_not_named_is_missed(tmp_path: Path):
    store = tmp_path / "store"
    LinkedNumbers(store, "f").claim("1/1", 1)
    run = make_shard(tmp_path / "a", "1/1", [0], incarnation=1, store=str(store))
    with pytest.raises(UsageError, match="incarnation 2 of shard 1/1"):
        merge([run], tmp_path / "index.jsonl")


def test_a_missing_shard_is_named(tmp_path: Path, both: list[Path]):
    with pytest.raises(UsageError, match="1 shards are missing: 2/2"):
        merge(both[:1], tmp_path / "index.jsonl")


@pytest.mark.parametrize(
    ("name", "value"),
    [("capture_layers", (1, 2, 3)), ("model_sha256", "f" * 64), ("format", "safetensors"), ("chunk_size", 512)],
)
def test_manifests_that_disagree_are_refused_with_the_difference(tmp_path: Path, name: str, value: object):
    one = make_shard(tmp_path / "a", "1/2", EVEN)
    other = make_shard(tmp_path / "b", "2/2", ODD, state=State.PENDING, manifest={name: value})
    with pytest.raises(UsageError, match="different jobs"):
        merge([one, other], tmp_path / "index.jsonl")


def test_other_numbers_of_shards_or_fleets_do_not_mix(tmp_path: Path, both: list[Path]):
    with pytest.raises(UsageError, match="different numbers of shards"):
        merge([*both, make_shard(tmp_path / "c", "3/3", [5])], tmp_path / "index.jsonl")
    with pytest.raises(UsageError, match="different fleets"):
        merge([both[0], make_shard(tmp_path / "d", "2/2", ODD, fleet="g")], tmp_path / "index.jsonl")


def test_a_badge_on_another_shards_run_is_refused(tmp_path: Path, both: list[Path]):
    badge = json.loads((both[0] / "fleet.json").read_text())
    (both[0] / "fleet.json").write_text(json.dumps(badge | {"shard": "2/2", "incarnation": 9}))
    make_shard(tmp_path / "c", "1/2", EVEN)
    with pytest.raises(UsageError, match="wears the badge"):
        merge([*both, tmp_path / "c"], tmp_path / "index.jsonl")


def test_rows_that_overlap_or_lack_are_refused(tmp_path: Path, both: list[Path]):
    with pytest.raises(HsjournalError, match="row 2 stands in"):
        merge([both[0], make_shard(tmp_path / "c", "2/2", [1, 2, 3])], tmp_path / "index.jsonl")
    with pytest.raises(HsjournalError, match="row 3 is in no shard"):
        merge([both[0], make_shard(tmp_path / "d", "2/2", [1])], tmp_path / "index.jsonl")


def test_rows_still_to_be_done_are_refused_unless_asked_for(tmp_path: Path):
    runs = [make_shard(tmp_path / "a", "1/2", EVEN), make_shard(tmp_path / "b", "2/2", ODD, state=State.SENT)]
    with pytest.raises(UsageError, match="2 rows are still to be done"):
        merge(runs, tmp_path / "index.jsonl")
    done = merge(runs, tmp_path / "index.jsonl", partial=True)
    assert (done.samples, done.incomplete, done.exit_code) == (3, 2, ExitCode.FAILED_SAMPLES)


def test_failed_rows_are_counted(tmp_path: Path):
    runs = [make_shard(tmp_path / "a", "1/2", EVEN), make_shard(tmp_path / "b", "2/2", ODD, state=State.FAILED)]
    done = merge(runs, tmp_path / "index.jsonl")
    assert (done.samples, done.failed, done.exit_code) == (3, 2, ExitCode.FAILED_SAMPLES)


def test_a_file_that_is_cut_leaves_the_old_index_whole(tmp_path: Path, both: list[Path]):
    index = tmp_path / "index.jsonl"
    merge(both, index)
    before = index.read_bytes()
    last = Path(index_of(index)[-1]["file"])
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(HsjournalError, match="bytes, not"):
        merge(both, index)
    assert index.read_bytes() == before
    assert not list(tmp_path.glob(".hsjournal-*"))


def test_runs_started_by_hand_count_as_incarnation_none(tmp_path: Path):
    runs = [
        make_shard(tmp_path / "a", "1/2", EVEN, incarnation=None, fleet=""),
        make_shard(tmp_path / "b", "2/2", ODD, incarnation=None),
    ]
    assert merge(runs, tmp_path / "index.jsonl").samples == 5


def test_a_folder_without_a_run_is_named(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(NoJournalError, match=place.name):
            merge([place], tmp_path / "index.jsonl")


def test_status_tells_all_and_refuses_nothing(tmp_path: Path, both: list[Path]):
    copy = tmp_path / "copy"
    shutil.copytree(both[0], copy)
    newer = make_shard(tmp_path / "c", "2/2", ODD, incarnation=4)
    found = survey([*both, copy, newer, tmp_path / "nowhere"])
    assert "twice" in found["unclear"]
    assert list(found["unreadable"]) == [str(tmp_path / "nowhere")]
    assert {s["run_dir"]: s["incarnation"] for s in found["shards"]}[str(newer)] == 4
    clear = survey([*both, newer])
    assert (clear["unclear"], clear["rows"], clear["counts"]["verified"], clear["complete"]) == (None, 5, 5, True)
    assert [s["run_dir"] for s in clear["shards"] if not s["counts_here"]] == [str(both[1])]


def test_verify_reads_the_files_that_count(tmp_path: Path, both: list[Path]):
    newer = make_shard(tmp_path / "c", "2/2", ODD, incarnation=2)
    for run, bad in ((both[1], "passed over"), (both[0], "counts")):
        file = next((run / "out").rglob("*.ckpt"))
        data = bytearray(file.read_bytes())
        data[-2000] ^= 1
        file.write_bytes(data)
        found = check([*both, newer], Subset(), 0, lambda _member, _progress: None)
        assert found.exit_code == (ExitCode.DONE if bad == "passed over" else ExitCode.FAILED_SAMPLES)
        assert found.to_json()["checked"] == 5
