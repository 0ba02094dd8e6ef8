"""Bad arguments: one clear sentence with the remedy, the documented exit code, no traceback, nothing left behind."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from hsjournal.config import RunPaths
from hsjournal.journal.locks import Lock
from hsjournal.states import State
from tests.helpers.cli import Result, hsjournal
from tests.helpers.runs import make_run
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "a", "input_ids": list(range(3, 30)), "loss_mask": [1] * 27}) + "\n")
    return path


def refused(result: Result, code: int, *words: str) -> None:
    lines = [line for line in result.err.splitlines() if line.strip()]
    assert result.code == code, result
    assert len(lines) == 1, result.err
    assert lines[0].startswith("hsjournal: ")
    assert "Traceback" not in result.out + result.err
    for word in words:
        assert word in lines[0]


def test_no_prompts_file(tmp_path: Path, model: Path) -> None:
    refused(
        hsjournal("run", tmp_path / "run", "--prompts", tmp_path / "none.jsonl", "--model", model),
        2,
        "none.jsonl",
        "--prompts",
    )


def test_no_prompts_at_all(tmp_path: Path, model: Path) -> None:
    refused(hsjournal("run", tmp_path / "run", "--model", model), 2, "--prompts FILE")


def test_prompts_are_a_folder(tmp_path: Path, model: Path) -> None:
    refused(hsjournal("run", tmp_path / "run", "--prompts", tmp_path, "--model", model), 2, str(tmp_path))


def test_empty_prompts_file(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    refused(
        hsjournal("run", tmp_path / "run", "--prompts", tmp_path / "empty.jsonl", "--model", model),
        2,
        "empty.jsonl",
        "empty",
    )


def test_no_usable_line(tmp_path: Path, model: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{broken\n[]\n")
    refused(hsjournal("run", tmp_path / "run", "--prompts", tmp_path / "bad.jsonl", "--model", model), 2, "bad.jsonl")


def test_neither_model_nor_server(tmp_path: Path, prompts: Path) -> None:
    refused(hsjournal("run", tmp_path / "run", "--prompts", prompts), 2, "--model DIR", "--server URL")


def test_unreadable_model_folder(tmp_path: Path, prompts: Path) -> None:
    refused(
        hsjournal("run", tmp_path / "run", "--prompts", prompts, "--model", tmp_path / "nomodel"),
        2,
        "nomodel",
        "config.json",
    )


def test_damaged_model(tmp_path: Path, prompts: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{not json")
    refused(hsjournal("run", tmp_path / "run", "--prompts", prompts, "--model", tmp_path / "m"), 2, str(tmp_path / "m"))


def test_layers_that_the_model_has_not(tmp_path: Path, prompts: Path, model: Path) -> None:
    refused(hsjournal("run", tmp_path / "run", "--prompts", prompts, "--model", model, "--layers", "1,2,99"), 2, "99")


def test_output_not_empty(tmp_path: Path, prompts: Path, model: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "data_0.ckpt").touch()
    refused(
        hsjournal("run", tmp_path / "run", "--prompts", prompts, "--model", model, "--out", out), 2, str(out), "--out"
    )
    assert [p.name for p in out.iterdir()] == ["data_0.ckpt"]


def test_run_directory_with_other_things(tmp_path: Path, prompts: Path, model: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    refused(hsjournal("run", tmp_path / "run", "--prompts", prompts, "--model", model), 2, "thesis.tex")


def test_run_directory_locked(tmp_path: Path, prompts: Path, model: Path) -> None:
    paths = RunPaths.of(tmp_path / "run")
    paths.run_dir.mkdir()
    lock = Lock(paths.supervisor_lock)
    lock.acquire()
    try:
        refused(
            hsjournal("run", paths.run_dir, "--prompts", prompts, "--model", model), 11, str(paths.run_dir), "process"
        )
    finally:
        lock.release()


def test_port_taken(tmp_path: Path, prompts: Path, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(
            hsjournal("run", tmp_path / "run", "--prompts", prompts, "--model", model, "--port", str(port)),
            13,
            str(port),
        )


def test_server_unreachable(tmp_path: Path, prompts: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        refused(hsjournal("run", tmp_path / "run", "--prompts", prompts, "--server", url), 13, url, "--server")


def test_server_address_is_none(tmp_path: Path, prompts: Path) -> None:
    refused(hsjournal("run", tmp_path / "run", "--prompts", prompts, "--server", "localhost:1"), 2, "http://HOST:PORT")


def test_engine_options_beside_a_server(tmp_path: Path, prompts: Path) -> None:
    refused(
        hsjournal("run", tmp_path / "run", "--prompts", prompts, "--server", "http://127.0.0.1:9", "--layers", "1"),
        2,
        "--layers",
    )


def test_too_little_room(tmp_path: Path, prompts: Path, model: Path) -> None:
    """A budget below the longest sample's dump can never be met."""
    result = hsjournal("run", tmp_path / "run", "--prompts", prompts, "--model", model, "--handover-budget", "1000")
    refused(result, 5, "1,000", "--handover-budget")


def test_unknown_format(tmp_path: Path, prompts: Path, model: Path) -> None:
    refused(
        hsjournal("run", tmp_path / "run", "--prompts", prompts, "--model", model, "--format", "parquet"),
        2,
        "parquet",
        "specforge",
    )


@pytest.mark.parametrize(
    ("page", "words"), [("none/page.html", "Check that path"), ("x" * 300, "Check that path"), ("/proc/page.html", "")]
)
def test_what_the_system_refuses_has_a_remedy_too(tmp_path: Path, page: str, words: str) -> None:
    run = make_run(tmp_path, [State.PENDING])
    refused(hsjournal("report", run.paths.run_dir, "--to", tmp_path / page), 1, page, ". ", words)


@pytest.mark.parametrize("command", ["resume", "status"])
def test_no_journal(tmp_path: Path, command: str) -> None:
    refused(hsjournal(command, tmp_path / "nothing"), 10, "nothing", "hsjournal run")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("command", ["run", "resume"])
@pytest.mark.parametrize(
    ("content", "code", "word"), [(None, 10, "is missing"), (b"", 12, "no journal of hsjournal"), (b"x" * 8192, 12, "is damaged")]
)  # fmt: skip
def test_a_run_whose_journal_is_missing_or_no_journal(
    tmp_path: Path, command: str, content: bytes | None, code: int, word: str
) -> None:
    run = make_run(tmp_path, [State.VERIFIED, State.PENDING])
    for file in run.paths.run_dir.glob("journal.db*"):
        file.unlink()
    if content is not None:
        run.paths.journal.write_bytes(content)
    refused(hsjournal(command, run.paths.run_dir), code, str(run.paths.journal), word, "Restore it from a copy")
    assert run.paths.journal.exists() == (content is not None)
    assert content is None or run.paths.journal.read_bytes() == content
