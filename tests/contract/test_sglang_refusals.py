"""A plugin that can't capture never breaks serving, and the preflight says why in one sentence.

The plugin's real hooks behind a scripted front (which answers as SGLang does, and knows nothing of the capture), our real
client and preflight before it. A server that really runs stands in tests/integration/test_sglang_capture.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web

from hsjournal.capture import sglang_capture, sglang_plugin
from hsjournal.capture.sglang_capture import Capture
from hsjournal.capture.sglang_pieces import Pieces
from hsjournal.capture.sglang_plugin import Hooks
from hsjournal.capture.sglang_setup import settings_from
from hsjournal.errors import ServerError
from hsjournal.server.client import ServerClient
from hsjournal.server.preflight import preflight
from tests.helpers.fake_server import Call, FakeServer
from tests.helpers.worker_runs import RUN_ID
from tests.unit.test_sglang_layers import always_plus_one, make_model
from tests.unit.test_sglang_rows import HIDDEN, NUM_AUX, batch, packed, runner


class Front:
    """A server around the hooks: each request is one forward pass.

    Args:
        root: the hand-over root.
        loaded: the model runner whose model was loaded.
    """

    def __init__(self, root: Path, loaded: Any, monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
        settings = settings_from({"HSJOURNAL_HANDOVER_ROOT": str(root)} | environ)
        assert settings is not None
        for name, value in (
            ("_version", "0.5.23"), ("_server_args", {"chunked_prefill_size": 64}), ("_parallel", {}),
        ):  # fmt: skip
            monkeypatch.setattr(sglang_plugin, name, lambda value=value: value)
        self.hooks, self.loaded = Hooks(settings), loaded
        self.hooks.after_load(None, loaded)
        self.server = FakeServer(root, tells=False)
        self.server.on(self.serve, probes=True)
        told = self.hooks.after_init_info({"max_total_num_tokens": 4096})
        self.server.info |= told or {}

    async def serve(self, call: Call) -> web.StreamResponse:
        """Prefill, as SGLang calls the hooks; the answer must be the model's own whatever they do."""
        tokens = len(call.ids)
        made = batch((str(call.rid), tokens, 0))
        made.input_ids = torch.tensor(list(call.ids))
        hidden, aux = packed(tokens, 0)

        def forward(_runner: Any, _batch: Any) -> str:
            self.hooks.before_logits(None, made.input_ids, hidden, None, made, aux)
            return "the model's answer"

        assert self.hooks.around_forward(forward, self.loaded, made) == "the model's answer"
        request = SimpleNamespace(rid=str(call.rid), finished=lambda: True, finished_reason=None)
        self.hooks.after_result(None, None, SimpleNamespace(reqs=[request]))
        return call.reply()

    async def preflight(self) -> str:
        """What it refuses with."""
        async with self.server, ServerClient(self.server.url) as client:
            with pytest.raises(ServerError) as caught:
                await preflight(client, self.server.root, RUN_ID, timeout=10.0)
            # And it serves: somebody else's request, and one more of ours.
            for rid in (f"hsj-{RUN_ID}-1-1-3", f"hsj-{RUN_ID}-2-1-3"):
                assert (await client.generate(rid, [1, 2, 3])).prompt_tokens == 3
        return str(caught.value)


def unknown_class(_monkeypatch: pytest.MonkeyPatch) -> Any:
    loaded = runner()
    loaded.model = make_model("never_seen", always_plus_one)
    loaded.model.parameters = lambda: iter([torch.zeros(1)])
    return loaded


def missing_method(_monkeypatch: pytest.MonkeyPatch) -> Any:
    loaded = runner()
    loaded.model = type("PlainModel", (), {"parameters": lambda self: iter([torch.zeros(1)])})()
    return loaded


def memlock(monkeypatch: pytest.MonkeyPatch) -> Any:
    def no_pinned_memory(*_: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory (cudaHostAlloc)")

    monkeypatch.setattr(Pieces, "_make", no_pinned_memory)
    return runner()


def failing_at_load(monkeypatch: pytest.MonkeyPatch) -> Any:
    def fails(*_: Any) -> Any:
        raise KeyError("layers_block_type")

    monkeypatch.setattr(sglang_capture, "arrange", fails)
    return runner()


def failing_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> Any:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("of a kind that nobody foresaw")

    monkeypatch.setattr(Capture, "_take", fails)
    return runner()


def other_layout(monkeypatch: pytest.MonkeyPatch) -> Any:
    loaded = runner()
    loaded.model.model.layers_to_capture = None
    del loaded.model.model.layers
    return loaded


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (unknown_class, ["Model is not a model whose capture hsjournal knows"]),
        (missing_method, ["PlainModel has no set_eagle3_layers_to_capture"]),
        (memlock, ["buffers of", "memlock limit", "ulimit -l", "--chunked-prefill-size"]),
        (failing_at_load, ["arranging the capture failed", "KeyError", "layers_block_type"]),
        (failing_in_a_pass, ["internal", "ZeroDivisionError: of a kind that nobody foresaw"]),
        (other_layout, ["keeps no list of layers to capture where hsjournal looks for it"]),
    ],
)
async def test_it_is_named_in_one_sentence_and_the_server_serves(
    make: Callable[[pytest.MonkeyPatch], Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Front(tmp_path / "root", make(monkeypatch), monkeypatch)
    (tmp_path / "root").mkdir(exist_ok=True)
    sentence = await front.preflight()
    assert sentence.startswith(f"{front.server.url} can't capture: ")
    assert "\n" not in sentence
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "HSJOURNAL_CAPTURE_LAYERS",
            "1,five",
            "HSJOURNAL_CAPTURE_LAYERS is '1,five' in its environment; write layer numbers",
        ),
        (
            "HSJOURNAL_HANDOVER_ROOT",
            "a/root",
            "HSJOURNAL_HANDOVER_ROOT is 'a/root' in its environment; write an absolute path",
        ),
    ],
)
async def test_a_variable_that_cannot_be_read_is_named_to_the_client(
    name: str, value: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root").mkdir()
    front = Front(tmp_path / "root", runner(), monkeypatch, **{name: value})
    sentence = await front.preflight()
    assert sentence.startswith(f"{front.server.url} can't capture: {words}")
    assert not (tmp_path / "a").exists()


def test_the_hooks_are_registered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own registry stands in for itself: without its hooks the server would say nothing of us at all."""
    registered: list[str] = []
    registry = SimpleNamespace(register=lambda target, _hook, _kind: registered.append(target))
    kinds = SimpleNamespace(AFTER=0, AROUND=1, BEFORE=2)
    module = SimpleNamespace(HookRegistry=registry, HookType=kinds)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", SimpleNamespace())
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setenv("HSJOURNAL_HANDOVER_ROOT", "a/root")
    monkeypatch.setenv("HSJOURNAL_BOOT_ID", "boot")
    sglang_plugin.register()
    assert any(target.endswith("Scheduler.get_init_info") for target in registered)


async def test_a_plugin_that_captures_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same front with nothing wrong: what is refused above is not refused for another reason."""
    front = Front(tmp_path / "root", runner(), monkeypatch)
    async with front.server, ServerClient(front.server.url) as client:
        facts = await preflight(client, front.server.root, RUN_ID, timeout=10.0)
    assert (facts.meta.engine, facts.meta.hidden_size, len(facts.meta.capture_layers)) == ("sglang", HIDDEN, NUM_AUX)
    assert facts.draft_layer_ids == (1, 3, 4)


async def test_a_server_without_the_plugin_is_told_how_to_get_it(tmp_path: Path) -> None:
    fake = FakeServer(tmp_path)
    fake.info["hsjournal"] = None
    async with fake, ServerClient(fake.url) as client:
        with pytest.raises(ServerError, match="Install hsjournal into the server's own Python environment"):
            await preflight(client, tmp_path, RUN_ID)
        assert fake.calls == []


async def test_a_root_that_is_not_shared_is_named_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, ours = Front(tmp_path / "theirs", runner(), monkeypatch), tmp_path / "ours"
    ours.mkdir()
    async with front.server, ServerClient(front.server.url) as client:
        with pytest.raises(ServerError) as caught:
            await preflight(client, ours, RUN_ID, timeout=1.0)
    text = str(caught.value)
    assert f"no dump arrives in {ours}, and the server writes into {tmp_path / 'theirs'} on its side" in text
    assert "Server and client do not share this folder" in text
    assert f"HSJOURNAL_HANDOVER_ROOT={ours}" in text


async def test_another_server_that_writes_into_the_same_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(tmp_path / "root", runner(), monkeypatch)
    front.server.info["hsjournal"] = front.server.info["hsjournal"] | {"boot_id": "another"}
    async with front.server, ServerClient(front.server.url) as client:
        with pytest.raises(ServerError, match="says that it is 'another', and its dumps say"):
            await preflight(client, front.server.root, RUN_ID, timeout=10.0)


@pytest.mark.parametrize("cut", [7, 15])
async def test_a_server_that_cuts_a_probe(tmp_path: Path, cut: int) -> None:
    fake = FakeServer(tmp_path)

    async def cuts(call: Call) -> web.StreamResponse:
        call.publish()
        return call.reply(prompt_tokens=cut)

    fake.on(cuts, probes=True)
    async with fake, ServerClient(fake.url) as client:
        with pytest.raises(ServerError, match=f"ran {cut} of a probe's 16 tokens.*--context-length"):
            await preflight(client, tmp_path, RUN_ID)
