from __future__ import annotations

import pytest

from hsjournal.capture.embedded.layers import choose_layers, parse_layers
from hsjournal.errors import UsageError


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(7, (1, 2, 3)), (8, (1, 3, 4)), (30, (1, 14, 26)), (36, (1, 17, 32)), (61, (1, 29, 57))],
)
def test_default_layers(num_layers: int, expected: tuple[int, ...]) -> None:
    assert choose_layers(None, num_layers) == expected


@pytest.mark.parametrize("num_layers", range(7, 100))
def test_default_layers_are_distinct_and_ascending(num_layers: int) -> None:
    layers = choose_layers(None, num_layers)
    assert list(layers) == sorted(set(layers))
    assert choose_layers(layers, num_layers) == layers


@pytest.mark.parametrize("num_layers", [1, 2, 6])
def test_small_models_need_a_choice(num_layers: int) -> None:
    with pytest.raises(UsageError, match="--layers"):
        choose_layers(None, num_layers)


def test_a_small_model_with_a_choice_is_fine() -> None:
    assert choose_layers((0, 2), 4) == (0, 2)


@pytest.mark.parametrize("asked", [(), (-1, 2), (2, 7), (2, 8), (3, 1), (1, 1), (1, 3, 3)])
def test_impossible_choices_are_refused(asked: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="0 to 6"):
        choose_layers(asked, 8)


def test_parse_layers() -> None:
    assert parse_layers("1,5, 8") == (1, 5, 8)


@pytest.mark.parametrize("text", ["", "a", "1,", "1.5", "1;2"])
def test_parse_layers_refuses_other_text(text: str) -> None:
    with pytest.raises(UsageError, match="--layers"):
        parse_layers(text)
