"""A new run is looked at before anything is started for it: `run` and its rehearsal refuse the same things."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hsjournal.cli import beginning
from hsjournal.errors import ExitCode, PromptsError
from tests.helpers.cli import hsjournal
from tests.helpers.fake_server import FakeServer
from tests.helpers.mounts import fill, tmpfs
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.worker_runs import Run, collected  # noqa: F401

NO_SERVER = "python -m there_is_no_such_server --model-path {model}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": str(n), "input_ids": list(range(3, 60 + n)), "loss_mask": [1] * (57 + n)} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("rehearsed", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--out", "/dev/null/x"], 2, ["the output folder /dev/null/x", "--out"]),
        (["--out", "/proc/nope/out"], 2, ["the output folder /proc/nope/out", "--out"]),
        (["--out", "{tmp}/a", "--out", "{tmp}/a/b"], 2, ["one lies in the other"]),
        (["--handover-root", "/dev/null/x"], 2, ["the hand-over root /dev/null/x", "--handover-root"]),
        (["--handover-root", "{tmp}/r", "--handover-root", "{tmp}/s"], 2, ["several --handover-root"]),
        (["--model", "{tmp}/" + "x" * 300], 2, ["can't be read", "--model"]),
        (["--model", "{tmp}/none"], 2, ["no config.json"]),
        (["--server", "ftp://x"], 2, ["not the address of a server"]),
        (["--prompts", "{tmp}/bad.jsonl"], 2, ["bad.jsonl", "JSON array"]),
    ],
)
def test_what_is_refused_before_a_server_is_started(
    rehearsed: list[str], arguments: list[str], code: int, words: list[str], tmp_path: Path, prompts: Path, model: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('[\n {"text": "x"},\n {"text": "y"}]\n')
    given = [a.format(tmp=tmp_path) for a in arguments]
    given += [] if "--prompts" in given else ["--prompts", str(prompts)]
    given += [] if {"--model", "--server"} & set(given) else ["--launch", NO_SERVER.format(model=model)]
    done = hsjournal("run", tmp_path / "run", *given, *rehearsed)
    assert done.code == code, done
    assert all(word in done.err for word in words), done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "a").exists()


def test_strangers_in_the_run_directory_and_no_model_are_refused_by_a_rehearsal_too(
    tmp_path: Path, prompts: Path, model: Path
) -> None:
    nobody = hsjournal("run", tmp_path / "run", "--prompts", prompts, "--dry-run")
    assert (nobody.code, "neither a model nor a server" in nobody.err) == (2, True), nobody.err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    strangers = hsjournal("run", tmp_path / "run", "--prompts", prompts, "--model", model, "--dry-run")
    assert (strangers.code, "thesis.tex" in strangers.err) == (2, True), strangers.err


def test_a_rehearsal_asks_no_server(tmp_path: Path, prompts: Path) -> None:
    given = ("run", tmp_path / "run", "--prompts", prompts, "--server", "http://127.0.0.1:1")
    assert hsjournal(*given, "--dry-run").code == 0
    assert hsjournal(*given).code == ExitCode.SERVER


def test_a_rehearsal_says_what_would_be_taken_over(tmp_path: Path, prompts: Path, model: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "data_0.ckpt").touch()
    given = ("--prompts", prompts, "--model", model, "--adopt-from", tmp_path / "old", "--dry-run")
    done = hsjournal("run", tmp_path / "run", *given, "--out", tmp_path / "old")
    assert (done.code, f"what lies in {tmp_path / 'old'} would be taken over" in done.out) == (0, True), done


@pytest.mark.root
def test_too_little_room_is_refused_unless_told(tmp_path: Path, prompts: Path, model: Path) -> None:
    with tmpfs(tmp_path / "small", "128k") as small:
        given = ("--prompts", prompts, "--model", model, "--out", small / "out")
        for rehearsed in (["--dry-run"], []):
            done = hsjournal("run", tmp_path / "run", *given, *rehearsed)
            assert done.code == ExitCode.NO_ROOM, done
            assert f"{small / 'out'} has " in done.err
            assert "--allow-little-room" in done.err
            assert not (tmp_path / "run" / "manifest.toml").exists()
        assert hsjournal("run", tmp_path / "run", *given, "--allow-little-room", "--dry-run").code == 0
        begun = hsjournal("run", tmp_path / "run", *given, "--allow-little-room", "--pause-limit", "2")
        assert begun.code == ExitCode.NO_ROOM, begun
        assert hsjournal("status", tmp_path / "run", "--json").json()["counts"]["verified"]["rows"] > 0


@pytest.mark.root
def test_no_room_at_all_is_seen_before_a_server_is_started(tmp_path: Path, prompts: Path, model: Path) -> None:
    with tmpfs(tmp_path / "small", "128k") as small:
        fill(small)
        given = ("--prompts", prompts, "--launch", NO_SERVER.format(model=model), "--out", small / "out")
        done = hsjournal("run", tmp_path / "run", *given)
        assert (done.code, "there is no room at all" in done.err) == (ExitCode.NO_ROOM, True), done
        assert not (tmp_path / "run").exists()


async def test_a_resume_with_a_root_that_cannot_be_made_ends_at_once(tmp_path: Path) -> None:
    async with FakeServer(tmp_path / "root") as server:
        end = await Run(tmp_path, (5, 6), url=server.url).work(handover_root="/dev/null/x")
    assert end.code == ExitCode.USAGE
    assert "the hand-over root /dev/null/x can't be made or used: Not a directory" in end.sentence
    assert "--handover-root" in end.sentence


def test_first_lines_that_are_objects_leave_hope_and_others_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beginning, "FIRST_LINES", 3)
    path = tmp_path / "p.jsonl"
    path.write_text('{"image": 1}\n' * 4)
    beginning.refuse_no_prompts([str(path)])
    path.write_text("{\n" * 2 + '{"image": 1}\n' * 2)
    beginning.refuse_no_prompts([str(path)])
    path.write_text("{\n" * 4)
    with pytest.raises(PromptsError, match=r"none of the first 3 lines can be used; the first is p\.jsonl:1: "):
        beginning.refuse_no_prompts([str(path)])
    path.write_text('{"image": 1}\n' * 2)
    with pytest.raises(PromptsError, match="none of the 2 lines"):
        beginning.refuse_no_prompts([str(path)])
    path.write_text('{"image": 1}\n' + '{"text": "a"}\n')
    beginning.refuse_no_prompts([str(path)])
