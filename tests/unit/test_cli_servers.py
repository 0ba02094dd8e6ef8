"""Which servers a run works with: what the command line says now, else what the run was made with; and whether they agree."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hsjournal.cli import servers
from hsjournal.cli.servers import Wish, for_new_run, for_old_run
from hsjournal.config import LAUNCH, MORE_SERVERS, Endpoint, Manifest, RunPaths, Settings
from hsjournal.dump.protocol import Meta
from hsjournal.errors import ServerError, UsageError
from hsjournal.server.preflight.facts import ServerFacts
from hsjournal.server.preflight.several import agreed
from hsjournal.sink.formats import layout_named
from tests.helpers.runs import make_manifest

A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"
COMMAND = f"{sys.executable} -m sglang.launch_server --model-path /m --port 4567"


@pytest.fixture(autouse=True)
def _nobody_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_reach", lambda _servers: None)


def manifest_of(tmp_path: Path, **options: str) -> tuple[RunPaths, Manifest]:
    paths = RunPaths.of(tmp_path / "run")
    made = make_manifest(paths, tmp_path / "root-a")
    made = replace(made, options=made.options | options)
    paths.manifest.write_text(made.to_toml())
    return paths, Manifest.load(paths.manifest)


def test_one_root_for_all_or_one_each(tmp_path: Path) -> None:
    paths, layout = RunPaths.of(tmp_path), layout_named("specforge")
    found = for_new_run(paths, Wish(servers=(A, B), handover_roots=(tmp_path / "r",)), layout)
    assert [e.handover_root for e in found.endpoints] == [str(tmp_path / "r")] * 2
    found = for_new_run(paths, Wish(servers=(A, f"{B}/"), handover_roots=(tmp_path / "a", tmp_path / "b")), layout)
    assert found.endpoints == (Endpoint(A, str(tmp_path / "a")), Endpoint(B, str(tmp_path / "b")))
    assert found.own is None
    found = for_new_run(paths, Wish(servers=(A,)), layout)
    assert found.endpoints[0].handover_root == str(paths.default_handover_root)


def test_a_run_that_goes_on_knows_its_servers(tmp_path: Path) -> None:
    paths, manifest = manifest_of(tmp_path, server=A, **{MORE_SERVERS: json.dumps([[B, "/dev/shm/b"]])})
    found = for_old_run(paths, Wish(), manifest)
    assert found.endpoints == (Endpoint(A, str(tmp_path / "root-a")), Endpoint(B, "/dev/shm/b"))
    only_one = for_old_run(paths, Wish(servers=(B,)), manifest)
    assert only_one.endpoints == (Endpoint(B, "/dev/shm/b"),)  # with the root that it had


def test_a_launched_one_is_launched_again_with_the_runs_layers(tmp_path: Path) -> None:
    paths, manifest = manifest_of(tmp_path, **{LAUNCH: COMMAND})
    found = for_old_run(paths, Wish(start_timeout=5.0), manifest)
    assert found.own is not None
    assert found.own.url == "http://127.0.0.1:4567"
    assert found.launch == COMMAND
    attached = for_old_run(paths, Wish(servers=(A,)), manifest)
    assert attached.own is None


def test_settings_survive_the_way_to_the_worker() -> None:
    settings = Settings(A, "/a", more_servers=(Endpoint(B, "/b"),))
    assert Settings.from_json(settings.to_json()) == settings
    assert settings.endpoints == (Endpoint(A, "/a"), Endpoint(B, "/b"))


def test_both_ways_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--server attaches"):
        for_new_run(RunPaths.of(tmp_path), Wish(servers=(A,), launch=COMMAND), layout_named("specforge"))


def facts(boot_id: str, *, layers: tuple[int, ...] = (1, 3, 5), context: int = 4096, model: str = "/m") -> ServerFacts:
    meta = Meta.__new__(Meta)
    for name, value in {
        "capture_layers": layers,
        "hidden_size": 8,
        "dtype": "bfloat16",
        "final_norm": "post",
        "engine": "sglang",
    }.items():
        object.__setattr__(meta, name, value)
    return ServerFacts(boot_id, meta, context, 32_000, 8, 2048, model, longest_prompt=context - 7)


def test_servers_that_agree_have_the_shortest_limits_of_all() -> None:
    found = agreed({A: facts("a"), B: facts("b", context=2048)})
    assert (found.boot_id, found.context_length, found.longest_prompt) == ("a", 2048, 2041)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (facts("b", layers=(1, 3, 4)), r"capture layers: \[1, 3, 5\] and \[1, 3, 4\]"),
        (facts("b", model="/other"), "model: /m and /other"),
        (facts("a"), "one and the same server"),
    ],
)
def test_servers_that_do_not(other: ServerFacts, words: str) -> None:
    with pytest.raises(ServerError, match=words) as error:
        agreed({A: facts("a"), B: other})
    assert A in str(error.value)
    assert B in str(error.value)
