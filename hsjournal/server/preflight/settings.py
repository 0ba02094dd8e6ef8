"""What a server's resolved settings must be, from ``/server_info`` alone: nothing is sent.

SGLang shows its settings as it resolved them, and again for each data-parallel rank under ``internal_states``. The key
``hsjournal`` in each is our plugin's (or the embedded engine's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hsjournal.errors import ServerError

OFF: tuple[object, ...] = (None, "", False, 0, "NONE", "null", "none")
ROOT_VARIABLE = "HSJOURNAL_HANDOVER_ROOT"
PLUGINS_VARIABLE = "SGLANG_PLUGINS"


@dataclass(frozen=True, slots=True)
class Rule:
    """A setting with which states can't be captured.

    Args:
        name: of the setting.
        is_wrong: of its value; a setting that the server does not name is right.
        what: what is wrong, with ``{value}``.
        remedy: what to change in the server's command line.
    """

    name: str
    is_wrong: Callable[[object], bool]
    what: str
    remedy: str


def _is_on(value: object) -> bool:
    return value not in OFF and value != []


def _is_off(value: object) -> bool:
    return value is False


def _is_several(value: object) -> bool:
    return type(value) is int and value > 1


def _without(name: str, what: str) -> Rule:
    flag = "--" + name.replace("_", "-")
    return Rule(name, _is_on, what, f"Start it without {flag}.")


def _one(name: str, what: str) -> Rule:
    flag = "--" + name.replace("_", "-")
    return Rule(name, _is_several, what + " ({value})", f"Start it with {flag} 1.")


RULES: tuple[Rule, ...] = (
    _without("speculative_algorithm", "decodes speculatively ({value}), and captures fewer rows than tokens then"),
    _without("decoupled_spec_role", "decodes speculatively with another server ({value})"),
    Rule(
        "disable_radix_cache",
        _is_off,
        "keeps a prefix cache: what it finds there is not computed, so it has no states",
        "Start it with --disable-radix-cache.",
    ),
    _one("pp_size", "spreads the layers over pipeline stages"),
    _one("attn_cp_size", "shards the rows by context parallelism"),
    _without("enable_prefill_cp", "shards the rows by context parallelism"),
    _without("enable_prefill_context_parallel", "shards the rows by context parallelism"),
    _one("dcp_size", "shards the rows by decode context parallelism"),
    _without("enable_two_batch_overlap", "splits each batch in two"),
    _without("enable_layernorm_sp", "shards the rows by sequence parallelism of the layer norms"),
    _without("disaggregation_mode", "does only a part of the work (prefill/decode disaggregation: {value})"),
    _without("enable_pdmux", "multiplexes prefill and decode"),
    _without("enable_return_aux_hidden_states", "captures aux states of its own, which overwrite the chosen layers"),
    _without("return_aux_hidden_state_layer_ids", "captures aux states of its own, which overwrite the chosen layers"),
    _without("is_embedding", "serves an embedding model"),
    _without("encoder_only", "serves an encoder only"),
    _without("dllm_algorithm", "serves a diffusion language model"),
)


def check_settings(url: str, info: Mapping[str, Any]) -> None:
    """Refuse a server whose settings are known to give wrong, missing or no states.

    Args:
        url: of the server, for the message.
        info: its ``/server_info``.

    Raises:
        ServerError: for the first thing that is wrong, with what to change in the server's command line.
    """
    for what, remedy in faults(info):
        raise ServerError(f"{url} {what}", remedy=remedy)


def faults(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """All that is wrong with a server by its ``/server_info``: what it does, and what to change; each once."""
    yield from dict.fromkeys(_wrong_rules(info))
    if not ours(info):
        yield (
            "runs without hsjournal's capture plugin",
            (
                "Install hsjournal into the server's own Python environment, start the server with "
                f"{ROOT_VARIABLE}=DIR in its environment, and let {PLUGINS_VARIABLE}, if it is set there, name hsjournal "
                "too; the server's log tells what else kept the plugin out."
            ),
        )
        return
    for refusal in dict.fromkeys(str(ours(settings).get("refusal") or "") for settings in ranks(info)):
        if refusal:
            yield (
                f"can't capture: {refusal}",
                "Change the server's command line, or serve a model whose layers can be captured.",
            )
    if not context_length(info):
        yield "does not say how long a prompt may be", "Start it with --context-length TOKENS."


def _wrong_rules(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for settings in ranks(info):
        for rule in RULES:
            value = settings.get(rule.name)
            if rule.is_wrong(value):
                yield rule.what.format(value=value), rule.remedy


def ranks(info: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The server's settings, then those of each data-parallel rank as far as it tells."""
    yield info
    states = info.get("internal_states")
    yield from (state for state in states if isinstance(state, Mapping)) if isinstance(states, list) else ()


def ours(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """What our plugin, or the embedded engine, says of itself; empty where neither is."""
    found = info.get("hsjournal")
    return found if isinstance(found, Mapping) else {}


def count(value: object) -> int:
    """A positive number, or 0 for anything else."""
    return value if type(value) is int and value > 0 else 0


def context_length(info: Mapping[str, Any]) -> int:
    """Positions that the model has; 0 when unknown. SGLang's own setting is None unless it was given."""
    return count(ours(info).get("context_length")) or count(info.get("context_length"))


def longest_prompt(info: Mapping[str, Any]) -> int:
    """The longest prompt that is taken whole: SGLang needs some positions, and a pool, for itself; 0 when unknown."""
    limit = count(info.get("max_req_input_len"))
    known = [length for length in (context_length(info), limit - 1) if length > 0]
    return min(known, default=0)


def chunk_size(info: Mapping[str, Any]) -> int:
    """Tokens of a chunk of the chunked prefill, 0 when prompts are never split; each rank may have its own share."""
    found = [count(settings.get("chunked_prefill_size")) for settings in ranks(info)]
    return min((size for size in found if size), default=0)


def draft_layer_ids(info: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids with which SGLang itself would hand out the captured layers of this model; empty when it can't be known."""
    ids = ours(info).get("eagle_aux_hidden_state_layer_ids")
    return tuple(ids) if isinstance(ids, list) and all(type(i) is int for i in ids) else ()


def draft_config(ids: tuple[int, ...]) -> str:
    """The line for a draft model's ``config.json`` that makes SGLang serve the same layers; empty without ids.

    Some model classes of SGLang add 1 to these ids, some do not, some look at the first: the plugin asked the model.
    """
    if not ids:
        return ""
    listed = ", ".join(map(str, ids))
    return f'"eagle_config": {{"eagle_aux_hidden_state_layer_ids": [{listed}], "use_aux_hidden_state": true}}'
