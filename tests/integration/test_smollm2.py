"""A real small model: every output of the main job held against plain transformers."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hsjournal.prompts.masks import MaskMethod
from hsjournal.prompts.records import parse_record
from hsjournal.prompts.template import ChatTokenizer
from tests.helpers.reference import Reference, check_outputs
from tests.integration.conftest import RealRun

pytestmark = pytest.mark.timeout(900)  # the first run prepares the model


def test_outputs_equal_plain_transformers(smollm2_run: RealRun) -> None:
    found = check_outputs(smollm2_run.out_dir, Reference(smollm2_run.model))
    assert sorted(found) == list(range(6))
    assert {data["aux_hidden_state"].shape[-1] for data in found.values()} == {3 * 576}
    assert {tuple(data["hsjournal"]["capture_layers"]) for data in found.values()} == {(1, 14, 26)}


def test_the_loss_covers_the_assistants_words_and_the_end_of_turn(smollm2_run: RealRun) -> None:
    import torch

    path: Path = next(smollm2_run.out_dir.rglob("data_2.ckpt"))
    data = torch.load(path, weights_only=True)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_run.model)
    words = tokenizer.decode(data["input_ids"][data["loss_mask"].bool()])
    assert words.endswith("You are welcome.<|im_end|>")
    assert words.count("<|im_end|>") == 2
    assert "Thanks" not in words
    assert "Explain" not in words


def test_an_answer_that_begins_with_white_space_keeps_all_its_words(smollm2_run: RealRun) -> None:
    chat = ChatTokenizer(smollm2_run.model)
    ask = {"role": "user", "content": "Write a list."}
    methods = {}
    for words in ("\n\n- one\n- two", "  indented", "\tx", "plain"):
        turns = [ask, {"role": "assistant", "content": words}, ask, {"role": "assistant", "content": words}]
        encoded = chat.encode(parse_record({"messages": turns}))
        assert encoded.input_ids == chat.tokens(turns, None)
        ends = list(accumulate(encoded.loss_mask))
        counted = [chat.decode(encoded.input_ids[a:b]) for a, b in zip(ends[::2], ends[1::2], strict=False)]
        assert [shown.strip() for shown in counted] == [f"{words.strip()}<|im_end|>"] * 2
        methods[words] = encoded.method
    assert (methods["\n\n- one\n- two"], methods["plain"]) == (MaskMethod.SCAN, MaskMethod.PREFIX)
