"""Each setting with which a server can't be used, and what is to be changed: over the answer of a real SGLang 0.5.23."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hsjournal.capture.sglang_layers import choose_layers
from hsjournal.config import Manifest
from hsjournal.dump.protocol import Meta, tensor_entries
from hsjournal.errors import ExitCode, ServerError
from hsjournal.server.preflight.facts import ServerFacts, check_facts
from hsjournal.server.preflight.settings import (
    RULES,
    check_settings,
    chunk_size,
    context_length,
    draft_config,
    draft_layer_ids,
    longest_prompt,
)
from tests.helpers.worker_runs import _MANIFEST
from tests.unit.test_sglang_layers import (
    Rule,
    always_plus_one,
    handed_out,
    make_model,
    plus_one_if_first_is_one,
    plus_one_unless_largest_is_all,
)

URL = "http://127.0.0.1:30000"


def good_info() -> dict[str, Any]:
    """What matters of the answer of SGLang 0.5.23 as a test server of this repository gave it."""
    settings: dict[str, Any] = {
        "model_path": "/models/tiny", "context_length": None, "is_embedding": False, "chunked_prefill_size": 8192,
        "disable_radix_cache": True, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "attn_cp_size": 1,
        "enable_prefill_cp": False, "enable_layernorm_sp": False, "speculative_algorithm": None,
        "decoupled_spec_role": "null", "enable_two_batch_overlap": False, "dllm_algorithm": None,
        "disaggregation_mode": "null", "encoder_only": False, "enable_pdmux": False,
        "enable_return_aux_hidden_states": False, "return_aux_hidden_state_layer_ids": None,
    }  # fmt: skip
    ours = {
        "protocol": "hsjournal/v2", "boot_id": "b" * 32, "final_norm": "post", "handover_root": "/dev/shm/root",
        "engine": "sglang", "refusal": None, "capture_layers": [1, 3, 4], "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "num_layers": 8, "hidden_size": 256, "vocab_size": 320, "context_length": 2048, "dtype": "float32",
    }  # fmt: skip
    shared = {"max_total_num_tokens": 4096, "max_req_input_len": 2042, "version": "0.5.23"}
    return settings | shared | {"hsjournal": ours, "internal_states": [settings | {"hsjournal": ours}]}


def refusal(info: dict[str, Any]) -> str:
    with pytest.raises(ServerError) as caught:
        check_settings(URL, info)
    assert caught.value.exit_code == ExitCode.SERVER
    assert caught.value.message.startswith(URL)
    return str(caught.value)


def test_a_server_as_it_should_be_passes() -> None:
    check_settings(URL, good_info())


WRONG: list[tuple[str, object, str, str]] = [
    ("speculative_algorithm", "EAGLE3", "decodes speculatively (EAGLE3)", "without --speculative-algorithm"),
    ("speculative_algorithm", "NGRAM", "decodes speculatively (NGRAM)", "without --speculative-algorithm"),
    ("decoupled_spec_role", "verifier", "another server (verifier)", "without --decoupled-spec-role"),
    ("disable_radix_cache", False, "prefix cache", "with --disable-radix-cache"),
    ("pp_size", 2, "pipeline stages (2)", "with --pp-size 1"),
    ("attn_cp_size", 4, "context parallelism (4)", "with --attn-cp-size 1"),
    ("enable_prefill_cp", True, "context parallelism", "without --enable-prefill-cp"),
    (
        "enable_prefill_context_parallel",
        True,
        "context parallelism",
        "without --enable-prefill-context-parallel",
    ),
    ("dcp_size", 2, "decode context parallelism (2)", "with --dcp-size 1"),
    ("enable_two_batch_overlap", True, "splits each batch", "without --enable-two-batch-overlap"),
    ("enable_layernorm_sp", True, "sequence parallelism", "without --enable-layernorm-sp"),
    ("disaggregation_mode", "prefill", "disaggregation: prefill", "without --disaggregation-mode"),
    ("disaggregation_mode", "decode", "disaggregation: decode", "without --disaggregation-mode"),
    ("enable_pdmux", True, "multiplexes", "without --enable-pdmux"),
    ("enable_return_aux_hidden_states", True, "of its own", "without --enable-return-aux-hidden-states"),
    ("return_aux_hidden_state_layer_ids", [1, 2], "of its own", "without --return-aux-hidden-state-layer-ids"),
    ("is_embedding", True, "embedding model", "without --is-embedding"),
    ("encoder_only", True, "encoder only", "without --encoder-only"),
    ("dllm_algorithm", "LowConfidence", "diffusion", "without --dllm-algorithm"),
]


@pytest.mark.parametrize(("name", "value", "what", "remedy"), WRONG, ids=[f"{n}={v}" for n, v, _, _ in WRONG])
@pytest.mark.parametrize("where", ["front", "rank"])
def test_a_setting_with_which_states_cannot_be_captured(
    name: str, value: object, what: str, remedy: str, where: str
) -> None:
    info = good_info()
    (info if where == "front" else info["internal_states"][0])[name] = value
    text = refusal(info)
    assert what in text
    assert remedy in text


def test_every_rule_is_in_the_table_above() -> None:
    assert {rule.name for rule in RULES} == {name for name, *_ in WRONG}


def test_settings_that_an_older_version_does_not_have_are_no_fault() -> None:
    info = good_info()
    for rule in RULES:
        info.pop(rule.name, None)
        info["internal_states"][0].pop(rule.name, None)
    check_settings(URL, info)
    del info["internal_states"]
    check_settings(URL, info)


@pytest.mark.parametrize("there", [None, "no table", {}])
def test_a_server_without_the_plugin(there: object) -> None:
    info = good_info()
    info["hsjournal"] = there
    text = refusal(info)
    for word in (
        "without hsjournal's capture plugin",
        "Install hsjournal",
        "HSJOURNAL_HANDOVER_ROOT",
        "SGLANG_PLUGINS",
    ):
        assert word in text


@pytest.mark.parametrize("where", ["front", "rank"])
def test_the_plugins_own_refusal_is_told_word_for_word(where: str) -> None:
    info = good_info()
    sentence = "FooModel has no set_eagle3_layers_to_capture: SGLang can't hand out its layers' states"
    (info if where == "front" else info["internal_states"][0])["hsjournal"] = info["hsjournal"] | {"refusal": sentence}
    assert refusal(info).startswith(f"{URL} can't capture: {sentence}")


def test_an_unknown_context_length() -> None:
    info = good_info()
    del info["hsjournal"]["context_length"]
    assert "--context-length" in refusal(info)
    info["context_length"] = 1024
    check_settings(URL, info)
    assert context_length(info) == 1024


def test_the_longest_prompt_leaves_what_sglang_needs_for_itself() -> None:
    info = good_info()
    assert (context_length(info), longest_prompt(info)) == (2048, 2041)  # seen: 2,042 tokens are refused
    del info["max_req_input_len"]  # the embedded engine takes all
    assert longest_prompt(info) == 2048


def test_the_chunk_size_is_the_smallest_that_any_rank_has() -> None:
    info = good_info()
    assert chunk_size(info) == 8192
    info["internal_states"].append({"chunked_prefill_size": 4096})  # DP attention halves it
    assert chunk_size(info) == 4096
    assert chunk_size({"chunked_prefill_size": -1}) == 0


def test_the_line_for_the_draft_model() -> None:
    info = good_info()
    info["hsjournal"]["eagle_aux_hidden_state_layer_ids"] = [3, 6, 1]
    assert draft_config(draft_layer_ids(info)) == (
        '"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 6, 1], "use_aux_hidden_state": true}'
    )
    del info["hsjournal"]["eagle_aux_hidden_state_layer_ids"]
    assert draft_config(draft_layer_ids(info)) == ""


@pytest.mark.parametrize("layers", [(1, 3, 4), (2, 3, 5), (0, 2, 5), (4, 5, 6), (3,)])
@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("llama", always_plus_one),
        ("qwen3_moe", always_plus_one),
        ("deepseek_v2", plus_one_if_first_is_one),
        ("glm4_moe_lite", plus_one_if_first_is_one),
        ("gpt_oss", plus_one_unless_largest_is_all),
    ],
)
def test_the_line_makes_sglang_serve_the_captured_layers(family: str, rule: Rule, layers: tuple[int, ...]) -> None:
    """As SGLang serves the draft: it reads the line, and hands its ids to the target's own method."""
    flags = family == "qwen3_moe"
    chosen = choose_layers(make_model(family, rule, flags=flags), layers)
    line = draft_config(draft_layer_ids({"hsjournal": {"eagle_aux_hidden_state_layer_ids": list(chosen.ids)}}))
    draft = json.loads("{" + line + "}")
    assert draft["eagle_config"]["use_aux_hidden_state"] is True
    target = make_model(family, rule, flags=flags)
    target.set_eagle3_layers_to_capture(draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    assert handed_out(target, by_flag=flags) == list(layers)


def made_with(**changes: Any) -> Manifest:
    return replace(_MANIFEST, engine="sglang", dtype="float32", options={"model_path": "/models/a"}, **changes)


def seen(**changes: Any) -> ServerFacts:
    """What the server of a run made with :func:`made_with` is seen to be."""
    meta = {
        name: changes.pop(name)
        for name in ("hidden_size", "dtype", "capture_layers", "final_norm", "engine")
        if name in changes
    }
    usual: dict[str, Any] = {
        "hidden_size": 8, "dtype": "float32", "capture_layers": (1, 3, 5), "final_norm": "post", "engine": "sglang",
    } | meta  # fmt: skip
    tensors = tensor_entries(4, usual["hidden_size"], usual["dtype"], len(usual["capture_layers"]))
    whole = Meta(
        rid="hsj-test-p1-4", num_tokens=4, token_ids_sha256="0" * 64, chunks=(0,), boot_id="b", versions={},
        tensors=tensors, **usual,
    )  # fmt: skip
    facts: dict[str, Any] = {
        "context_length": 4096, "vocab_size": 32_000, "num_layers": 8, "chunk_size": 0, "model_path": "/models/a",
    } | changes  # fmt: skip
    return ServerFacts("b", whole, **facts)


def test_the_server_of_the_run_passes() -> None:
    check_facts(seen(), made_with())
    check_facts(seen(context_length=8192), made_with())


@pytest.mark.parametrize(
    ("changes", "words", "remedy"),
    [
        ({"capture_layers": (2, 4, 6)}, "capture layers is [2, 4, 6]", "HSJOURNAL_CAPTURE_LAYERS=1,3,5"),
        ({"final_norm": "pre"}, "final norm is pre", "HSJOURNAL_CAPTURE_PRENORM=0"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16", "--dtype float32"),
        ({"chunk_size": 2048}, "chunk size is 2048, the run was made with 0", "--chunked-prefill-size -1"),
        ({"context_length": 100}, "context length is 100", "--context-length 4096"),
        ({"model_path": "/models/b"}, "model is /models/b", "--model-path /models/a"),
        ({"hidden_size": 16}, "hidden size is 16", "see manifest.toml"),
        ({"vocab_size": 99}, "vocabulary size is 99", "see manifest.toml"),
        ({"num_layers": 9}, "number of layers is 9", "see manifest.toml"),
        ({"engine": "embedded"}, "engine is embedded", "see manifest.toml"),
        ({"dtype": "float16", "chunk_size": 5}, "dtype is float16", "--dtype float32, --chunked-prefill-size -1"),
    ],
)
def test_another_server_than_the_runs(changes: dict[str, Any], words: str, remedy: str) -> None:
    with pytest.raises(ServerError) as caught:
        check_facts(seen(**changes), made_with())
    assert caught.value.exit_code == ExitCode.SERVER
    assert words in str(caught.value)
    assert remedy in str(caught.value)
