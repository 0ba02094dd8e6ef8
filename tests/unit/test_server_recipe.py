"""A user's command line for SGLang: what is found in it, what is added, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hsjournal.errors import UsageError
from hsjournal.server.recipe import model_of, stock, value_of, words_of

PYTHON = sys.executable
COMMAND = f"{PYTHON} -m sglang.launch_server --model-path /models/m"


def test_port_and_host_are_added() -> None:
    made = stock(COMMAND, "/dev/shm/root")
    port = value_of(made.argv, "--port")
    assert port is not None
    assert made.url == f"http://127.0.0.1:{port}"
    assert value_of(made.argv, "--host") == "127.0.0.1"
    assert made.argv[:5] == (PYTHON, "-m", "sglang.launch_server", "--model-path", "/models/m")


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("--port 4567 --host 0.0.0.0", "http://127.0.0.1:4567"),
        ("--port=4567 --host=10.1.2.3", "http://10.1.2.3:4567"),
        ("--port 1 --host :: --port 4567", "http://[::1]:4567"),
    ],
)
def test_port_and_host_are_found(words: str, url: str) -> None:
    made = stock(f"{COMMAND} {words}", "/root")
    assert made.url == url
    assert made.argv[-len(words.split()) :] == tuple(words.split())


def test_variables_quotes_and_the_capture() -> None:
    made = stock(
        f"CUDA_VISIBLE_DEVICES=0,1 NAME='two words' {COMMAND} --json '{{\"a\": 1}}'",
        "/shm/r",
        layers=(1, 3, 5),
        prenorm=True,
    )
    assert made.environment == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NAME": "two words",
        "HSJOURNAL_HANDOVER_ROOT": "/shm/r",
        "HSJOURNAL_CAPTURE_LAYERS": "1,3,5",
        "HSJOURNAL_CAPTURE_PRENORM": "1",
    }
    assert '{"a": 1}' in made.argv
    assert made.without == ("HSJOURNAL_API_KEY",)


def test_without_layers_the_plugin_chooses() -> None:
    assert stock(COMMAND, "/r").environment == {"HSJOURNAL_HANDOVER_ROOT": "/r"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "is empty"),
        ("A=1", "is empty"),
        ("python -m 'sglang", "can't be read"),
        ("python -m sglang.launch_server && rm -rf /", "not run through a shell"),
        ("python -m sglang.launch_server > log", "not run through a shell"),
        (f"{COMMAND} --api-key s3cret", "every list of processes"),
        (f"{COMMAND} --admin-api-key=s3cret", "every list of processes"),
        (f"{COMMAND} --port many", "--port many"),
        ("no-such-program-anywhere -m x", "there is no program"),
    ],
)
def test_what_is_refused(command: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        stock(command, "/r")
    assert error.value.remedy
    assert "s3cret" not in str(error.value)


def test_the_model_is_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_of(f"python -m sglang.launch_server --model-path {tmp_path}") == str(tmp_path)
    assert model_of(f"python -m sglang.launch_server --model={tmp_path}") == str(tmp_path)
    assert model_of("python -m sglang.launch_server --model-path org/name") == ""


def test_words_are_a_shells() -> None:
    assert words_of("a 'b c' \"d\" e\\ f") == ["a", "b c", "d", "e f"]
