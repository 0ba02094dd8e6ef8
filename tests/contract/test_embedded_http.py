"""The embedded engine's HTTP answers, from a real process over a tiny model."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hsjournal.dump.protocol import CaptureFailure, Meta, RequestId, token_ids_sha256
from tests.helpers.engine import Engine, running_engine
from tests.helpers.tiny_models import VOCAB_SIZE, make_tiny_model

CONTEXT = 128


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = make_tiny_model("llama", tmp_path_factory.mktemp("model"), context_length=CONTEXT)
    root = Path(tempfile.mkdtemp(prefix="hsjournal-test-", dir="/dev/shm"))
    try:
        with running_engine(model, root) as running:
            yield running
            assert running.process.poll() is None, "the engine died on the way"
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    return iter(range(10_000))


def call(engine: Engine, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    host = engine.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method or ("GET" if data is None else "POST"), path, data)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content) if content else None


def generate(engine: Engine, **body: Any) -> tuple[int, Any]:
    return call(engine, "/generate", body)


def fresh(numbers: Iterator[int], tokens: int) -> str:
    return str(RequestId.sample("abcd", row=next(numbers), attempt=1, tokens=tokens))


@pytest.mark.parametrize("count", [0, 1])
def test_a_request_of_ours_is_answered_once_its_dump_is_published(
    engine: Engine, numbers: Iterator[int], count: int
) -> None:
    rid = fresh(numbers, 5)
    status, answer = generate(engine, rid=rid, input_ids=[9, 8, 7, 6, 5], sampling_params={"max_new_tokens": count})
    assert status == 200
    assert len(answer["output_ids"]) == count
    info = answer["meta_info"]
    assert (info["id"], info["prompt_tokens"], info["completion_tokens"]) == (rid, 5, count)
    assert info["finish_reason"]["type"] == "length"
    meta = Meta.from_json((engine.root / rid / "meta.json").read_bytes())
    assert meta.token_ids_sha256 == token_ids_sha256([9, 8, 7, 6, 5])
    assert (meta.boot_id, meta.engine, meta.dtype) == (engine.boot_id, "embedded", "float32")
    assert (engine.root / rid / "done").exists()
    assert engine.received_rids().count(rid) == 1


def test_a_list_of_requests_gets_a_list_of_answers(engine: Engine, numbers: Iterator[int]) -> None:
    rids = [fresh(numbers, 2), fresh(numbers, 3)]
    status, answers = generate(engine, rid=rids, input_ids=[[1, 2], [3, 4, 5]], sampling_params={"max_new_tokens": 0})
    assert status == 200
    assert [answer["meta_info"]["id"] for answer in answers] == rids
    assert all((engine.root / rid / "done").exists() for rid in rids)


@pytest.mark.parametrize("rid", ["foreign-1", "hsj-../evil", "hsj-abcd-01-1-3", "../../x", None])
def test_foreign_requests_are_served_and_not_captured(engine: Engine, rid: str | None) -> None:
    before = set(os.listdir(engine.root))
    named = {} if rid is None else {"rid": rid}
    status, answer = generate(engine, **named, input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 1})
    assert status == 200
    assert len(answer["output_ids"]) == 1
    assert rid is None or answer["meta_info"]["id"] == rid
    assert set(os.listdir(engine.root)) == before
    assert rid not in engine.received_rids()


def test_text_is_tokenized_where_there_is_a_tokenizer(engine: Engine) -> None:
    status, answer = generate(engine, text="hello", sampling_params={"max_new_tokens": 1})
    assert status == 200
    assert answer["meta_info"]["prompt_tokens"] == 5


BAD: list[tuple[Any, str]] = [
    (b"{bad", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"", "not JSON"),
    ([], "no object"),
    ({}, "Send input_ids"),
    ({"input_ids": [1], "text": "x"}, "Send input_ids"),
    ({"input_ids": 5}, "list of token ids"),
    ({"input_ids": "1 2"}, "list of token ids"),
    ({"input_ids": []}, "empty"),
    ({"input_ids": [[]]}, "empty"),
    ({"input_ids": [[1], 2]}, "list of token ids"),
    ({"input_ids": [1, "2"]}, "whole numbers"),
    ({"input_ids": [1, 2.5]}, "whole numbers"),
    ({"input_ids": [1, True]}, "whole numbers"),
    ({"input_ids": [1, None]}, "whole numbers"),
    ({"input_ids": [1, -1]}, "outside the vocabulary"),
    ({"input_ids": [1, VOCAB_SIZE]}, "outside the vocabulary"),
    ({"input_ids": [1, 10**30]}, "outside the vocabulary"),
    ({"input_ids": [1] * (CONTEXT + 1)}, "longer than the model's context length"),
    ({"input_ids": [1], "rid": 7}, "rid"),
    ({"input_ids": [1], "rid": ""}, "rid"),
    ({"input_ids": [1], "rid": ["a"]}, "rid"),
    ({"input_ids": [[1], [2]], "rid": "a"}, "rid"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "twice"),
    ({"input_ids": [1], "sampling_params": 3}, "sampling_params"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}, "only runs prefills"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "only runs prefills"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": "1"}}, "only runs prefills"),
    ({"input_ids": [1], "stream": True}, "stream"),
    ({"text": 5}, "text"),
    ({"text": []}, "text"),
]


@pytest.mark.parametrize(("body", "reason"), BAD, ids=range(len(BAD)))
def test_a_bad_request_is_refused_with_its_reason(engine: Engine, body: Any, reason: str) -> None:
    status, answer = call(engine, "/generate", body, method="POST")
    assert status == 400
    assert reason in answer["error"]["message"]
    assert generate(engine, input_ids=[1])[0] == 200, "the engine goes on"


def test_an_over_long_request_of_ours_is_refused_and_not_cut(engine: Engine, numbers: Iterator[int]) -> None:
    rid = fresh(numbers, CONTEXT + 1)
    status, answer = generate(engine, rid=rid, input_ids=[1] * (CONTEXT + 1))
    assert status == 400
    assert str(CONTEXT) in answer["error"]["message"]
    assert not (engine.root / rid).exists()
    rid = fresh(numbers, CONTEXT)
    assert generate(engine, rid=rid, input_ids=[1] * CONTEXT)[0] == 200


def test_another_token_count_than_the_rid_promises_is_refused_and_dumped(
    engine: Engine, numbers: Iterator[int]
) -> None:
    rid = fresh(numbers, 5)
    status, answer = generate(engine, rid=rid, input_ids=[1, 2, 3])
    assert status == 400
    assert "promises 5 tokens" in answer["error"]["message"]
    failure = CaptureFailure.from_json((engine.root / rid / "error").read_bytes())
    assert (failure.rid, failure.reason) == (rid, "mismatch")
    assert os.listdir(engine.root / rid) == ["error"]
    assert rid not in engine.received_rids()


def test_a_published_dump_is_kept_when_its_rid_comes_again(engine: Engine, numbers: Iterator[int]) -> None:
    rid = fresh(numbers, 3)
    assert generate(engine, rid=rid, input_ids=[1, 2, 3])[0] == 200
    before = (engine.root / rid / "meta.json").stat()
    assert generate(engine, rid=rid, input_ids=[4, 5, 6])[0] == 200
    after = (engine.root / rid / "meta.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_paths_and_methods_that_do_not_exist(engine: Engine) -> None:
    assert call(engine, "/nothing")[0] == 404
    assert call(engine, "/generate")[0] == 405
    assert call(engine, "/abort_request")[0] == 405
    assert "POST" in call(engine, "/generate")[1]["error"]["message"]


def test_health(engine: Engine) -> None:
    assert call(engine, "/health") == (200, None)
    assert call(engine, "/health_generate") == (200, None)
    assert not [name for name in os.listdir(engine.root) if "HEALTH" in name]


def test_server_info_tells_the_capture(engine: Engine) -> None:
    status, info = call(engine, "/server_info")
    assert status == 200
    assert call(engine, "/get_server_info")[1] == info
    assert info["context_length"] == CONTEXT
    assert info["speculative_algorithm"] is None
    capture = info["hsjournal"]
    assert capture["protocol"] == "hsjournal/v2"
    assert capture["boot_id"] == engine.boot_id
    assert capture["capture_layers"] == [1, 3, 4]
    assert (capture["num_layers"], capture["hidden_size"], capture["vocab_size"]) == (8, 64, VOCAB_SIZE)
    assert (capture["dtype"], capture["final_norm"], capture["engine"]) == ("float32", "post", "embedded")
    assert capture["handover_root"] == str(engine.root)


def test_model_info(engine: Engine) -> None:
    status, info = call(engine, "/model_info")
    assert status == 200
    assert info["is_generation"] is True
    assert info["architectures"] == ["LlamaForCausalLM"]
    assert call(engine, "/get_model_info")[1] == info


def test_a_connection_is_kept_for_many_requests(engine: Engine) -> None:
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=30)
    bodies: list[dict[str, list[int]]] = [{"input_ids": [1, 2]}, {"input_ids": []}, {"input_ids": [3]}]
    for body in bodies:
        connection.request("POST", "/generate", json.dumps(body))
        response = connection.getresponse()
        response.read()
        assert response.getheader("Connection") != "close"
    port = connection.sock.getsockname()
    connection.request("GET", "/health")
    connection.getresponse().read()
    assert connection.sock.getsockname() == port
    connection.close()


@pytest.mark.parametrize(
    "head",
    [
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"NONSENSE\r\n\r\n",
    ],
)
def test_bodies_that_can_not_be_read_are_refused(engine: Engine, head: bytes) -> None:
    host, port = engine.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(head)
        answer = raw.recv(65536)
        while part := raw.recv(65536):
            answer += part
    assert b" 4" in answer.split(b"\r\n")[0] or b"Error code: 4" in answer


def test_a_client_that_leaves_in_the_middle_costs_nothing(engine: Engine) -> None:
    host, port = engine.url.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    assert generate(engine, input_ids=[1])[0] == 200


def test_abort_needs_to_know_what(engine: Engine) -> None:
    assert call(engine, "/abort_request", {})[0] == 400
    assert call(engine, "/abort_request", {"rid": "never seen"})[0] == 200


def test_many_at_once_are_each_answered_and_dumped(engine: Engine, numbers: Iterator[int]) -> None:
    wanted = [(fresh(numbers, 1 + i % 40), [(i * 7 + j) % VOCAB_SIZE for j in range(1 + i % 40)]) for i in range(60)]
    answers: dict[str, int] = {}

    def send(rid: str, ids: list[int]) -> None:
        answers[rid] = generate(engine, rid=rid, input_ids=ids, sampling_params={"max_new_tokens": 1})[0]

    threads = [threading.Thread(target=send, args=item) for item in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers.values()) == {200}
    for rid, ids in wanted:
        meta = Meta.from_json((engine.root / rid / "meta.json").read_bytes())
        assert meta.token_ids_sha256 == token_ids_sha256(ids)
    assert not [name for name in os.listdir(engine.root) if name.startswith(".tmp-")]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose writer is held up, so that requests are in flight for a while."""
    model = make_tiny_model("llama", tmp_path_factory.mktemp("model"), context_length=CONTEXT)
    root = Path(tempfile.mkdtemp(prefix="hsjournal-test-", dir="/dev/shm"))
    try:
        with running_engine(model, root, environment={"HSJOURNAL_FAULTS": "capture.writing=delay:0.5"}) as running:
            yield running
    finally:
        shutil.rmtree(root, ignore_errors=True)


def start(engine: Engine, rid: str) -> tuple[threading.Thread, list[tuple[int, Any]]]:
    answers: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(generate(engine, rid=rid, input_ids=[1, 2, 3])))
    thread.start()
    deadline = time.monotonic() + 20
    while not (engine.root / f".tmp-{rid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return thread, answers


def test_a_rid_in_flight_is_refused_as_duplicate(slow: Engine, numbers: Iterator[int]) -> None:
    rid = fresh(numbers, 3)
    thread, answers = start(slow, rid)
    status, answer = generate(slow, rid=rid, input_ids=[1, 2, 3])
    assert status == 400
    assert "Duplicate request ID" in answer["error"]["message"]
    thread.join()
    assert answers[0][0] == 200
    assert slow.received_rids().count(rid) == 1
    assert (slow.root / rid / "done").exists()


def test_an_aborted_request_publishes_aborted(slow: Engine, numbers: Iterator[int]) -> None:
    rid = fresh(numbers, 3)
    thread, answers = start(slow, rid)
    assert call(slow, "/abort_request", {"rid": rid})[0] == 200
    thread.join()
    status, answer = answers[0]
    assert status == 200
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert CaptureFailure.from_json((slow.root / rid / "error").read_bytes()).reason == "aborted"
    assert not (slow.root / rid / "done").exists()


def test_a_writer_that_is_slow_does_not_hold_up_health(slow: Engine, numbers: Iterator[int]) -> None:
    thread, _ = start(slow, fresh(numbers, 3))
    begun = time.monotonic()
    assert call(slow, "/health_generate")[0] == 200
    assert time.monotonic() - begun < 1.0
    thread.join()
