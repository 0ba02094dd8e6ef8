"""Layer ids of stock SGLang's model families, without SGLang: the rules of their methods, as its sources have them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hsjournal.capture.sglang_layers import LayersError, check_family, check_layers, choose_layers, default_layers

LAYERS = 8
Rule = Callable[[Sequence[int], int], list[int]]


def always_plus_one(ids: Sequence[int], _n: int) -> list[int]:  # llama, qwen2, qwen3, glm4_moe, ...
    return [i + 1 for i in ids]


def plus_one_if_first_is_one(ids: Sequence[int], _n: int) -> list[int]:  # deepseek_v2, glm4_moe_lite
    return [i + 1 for i in ids] if ids and ids[0] == 1 else list(ids)


def plus_one_unless_largest_is_all(ids: Sequence[int], n: int) -> list[int]:  # gpt_oss
    return list(ids) if ids and max(ids) == n else [i + 1 for i in ids]


def verbatim(ids: Sequence[int], _n: int) -> list[int]:  # the inner models of the Qwen-MoE family
    return list(ids)


class Layer:
    pass


def make_model(
    family: str, rule: Rule, *, flags: bool = False, forgets_flags: bool = False, package: str = "sglang.srt.models"
) -> Any:
    """A model whose method follows ``rule`` and stands in the family's module."""
    inner_type = type("Inner", (), {"__module__": f"{package}.{family}"})
    inner = inner_type()
    inner.layers, inner.layers_to_capture = [Layer() for _ in range(LAYERS)], []

    def set_eagle3_layers_to_capture(self: Any, ids: list[int]) -> None:
        inner.layers_to_capture = rule(ids, LAYERS)
        for i in inner.layers_to_capture if flags and not forgets_flags else ():
            inner.layers[i]._is_layer_to_capture = True

    set_eagle3_layers_to_capture.__module__ = f"{package}.{family}"
    model = type("Model", (), {"set_eagle3_layers_to_capture": set_eagle3_layers_to_capture})()
    model.model = inner
    return model


def handed_out(model: Any, *, by_flag: bool) -> list[int]:
    """The layers whose OUTPUT the fake forward would append, in the order that it meets them."""
    inner = model.model
    if by_flag:
        return [i - 1 for i, layer in enumerate(inner.layers) if getattr(layer, "_is_layer_to_capture", False)]
    return [i - 1 for i in range(LAYERS) if i in inner.layers_to_capture]


@pytest.mark.parametrize("layers", [(1, 3, 4), (2, 3, 5), (0, 2, 5), (0, 1, 2), (4, 5, 6), (3,), (1,)])
@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("llama", always_plus_one),
        ("deepseek_v2", plus_one_if_first_is_one),
        ("glm4_moe_lite", plus_one_if_first_is_one),
        ("gpt_oss", plus_one_unless_largest_is_all),
        ("qwen3", verbatim),
    ],
)
def test_the_output_of_the_chosen_layers_is_handed_out_by_every_rule(
    family: str, rule: Rule, layers: tuple[int, ...]
) -> None:
    model = make_model(family, rule)
    chosen = choose_layers(model, layers)
    assert handed_out(model, by_flag=False) == list(layers)
    assert rule(chosen.ids, LAYERS) == model.model.layers_to_capture


def test_a_rule_that_can_not_yield_the_layers_is_refused_and_leaves_nothing_set() -> None:
    model = make_model("deepseek_v2", plus_one_if_first_is_one)
    with pytest.raises(LayersError, match="did not take"):
        choose_layers(model, (0,))  # [0] stays 0, [1] becomes 2: boundary 1 alone is out of this rule's reach
    assert model.model.layers_to_capture == []


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("rule", [always_plus_one, verbatim])
def test_flag_readers_have_exactly_the_wanted_flags_even_after_a_wrong_try(rule: Rule, forgets: bool) -> None:
    model = make_model("qwen3_moe", rule, flags=True, forgets_flags=forgets)
    choose_layers(model, (1, 3, 4))
    assert handed_out(model, by_flag=True) == [1, 3, 4]


def test_a_list_reader_gets_no_flags_since_it_would_capture_twice() -> None:
    model = make_model("bailing_moe", always_plus_one)
    choose_layers(model, (1, 3, 4))
    assert handed_out(model, by_flag=True) == []


def test_a_wrapper_is_judged_by_its_language_model() -> None:
    wrapper = make_model("kimi_k25", always_plus_one)
    wrapper.language_model = make_model("deepseek_v2", plus_one_if_first_is_one)
    check_family(wrapper, (0, 5, 23))
    wrapper.language_model = make_model("gemma3_causal", always_plus_one)
    with pytest.raises(LayersError, match="residual"):
        check_family(wrapper, (0, 5, 23))


@pytest.mark.parametrize(
    ("family", "package", "version", "words"),
    [
        ("gemma3_causal", "sglang.srt.models", (0, 5, 23), "residual"),
        ("gemma4_causal", "sglang.srt.models", (0, 5, 17), "overwrites"),
        ("brand_new", "sglang.srt.models", (0, 5, 23), "knows"),
        ("llama", "somebody.models", (0, 5, 23), "knows"),
    ],
)
def test_models_whose_capture_is_wrong_or_unknown_are_refused(
    family: str, package: str, version: tuple[int, ...], words: str
) -> None:
    with pytest.raises(LayersError, match=words):
        check_family(make_model(family, always_plus_one, package=package), version)


def test_gemma4_is_taken_from_the_version_that_copies() -> None:
    check_family(make_model("gemma4_causal", always_plus_one), (0, 5, 23))


def test_a_model_without_the_method_is_refused_by_name() -> None:
    with pytest.raises(LayersError, match="SimpleNamespace has no set_eagle3"):
        check_family(types.SimpleNamespace(), (0, 5, 23))


@pytest.mark.parametrize("layers", [(), (-1, 2), (7,), (8,), (3, 3)])
def test_layers_that_can_not_be_captured_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(LayersError):
        check_layers(layers, LAYERS)


def test_layers_are_sorted_and_defaults_are_distinct_from_seven_layers_on() -> None:
    assert check_layers((6, 0), LAYERS) == (0, 6)
    assert default_layers(61) == (1, 29, 57)
    assert default_layers(7) == (1, 2, 3)
    with pytest.raises(LayersError, match="HSJOURNAL_CAPTURE_LAYERS"):
        default_layers(6)


def test_the_module_does_not_import_sglang() -> None:
    assert "sglang" not in sys.modules
