"""A resume with anything else than the run was made for is refused, and the difference is shown."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from hsjournal.drift import Asked, refuse_drift, refuse_used_output
from hsjournal.errors import ExitCode, PromptsError, UsageError
from hsjournal.prompts.sources import source_of
from tests.unit.test_config import MANIFEST


@pytest.fixture
def made(tmp_path):
    """A manifest made with a model and prompts that lie here."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n')
    return replace(
        MANIFEST,
        model=str(tmp_path / "model"),
        model_sha256=hashlib.sha256(b"{}").hexdigest(),
        sources=(source_of(tmp_path / "prompts.jsonl"),),
        out_dir=str(tmp_path / "out"),
    )


def test_nothing_asked_is_no_drift(made, tmp_path):
    refuse_drift(made, Asked(), tmp_path)
    refuse_drift(made, Asked(dtype="auto"), tmp_path)


def test_the_same_asked_again_is_no_drift_wherever_the_files_lie_now(made, tmp_path):
    (tmp_path / "moved").mkdir()
    for name in ("model", "prompts.jsonl"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    asked = Asked(
        prompts=[tmp_path / "moved" / "prompts.jsonl"],
        model=str(tmp_path / "moved" / "model"),
        layers=(1, 30, 57),
        dtype="bfloat16",
        format="specforge",
        out_dirs=[tmp_path / "out"],
    )
    refuse_drift(made, asked, tmp_path)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Asked(layers=(1, 30, 58)), r"layers: the run was made with \[1, 30, 57\], now asked is \[1, 30, 58\]"),
        (Asked(layers=(30, 1, 57)), "layers"),
        (Asked(dtype="float32"), "dtype: the run was made with bfloat16, now asked is float32"),
        (Asked(format="other"), "format"),
        (Asked(out_dirs=[Path("/elsewhere")]), "output folders: .*now asked is /elsewhere"),
        (Asked(model="some/hub-name"), "model: .*some/hub-name"),
    ],
)
def test_each_difference_is_named(made, tmp_path, asked, words):
    with pytest.raises(UsageError, match=words) as caught:
        refuse_drift(made, asked, tmp_path)
    assert caught.value.exit_code is ExitCode.USAGE
    assert "new run directory" in str(caught.value)


def test_one_changed_letter_of_the_prompts_or_the_model_is_enough(made, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(UsageError, match=r"prompts: .*14 bytes, sha256 .*14 bytes, sha256"):
        refuse_drift(made, Asked(prompts=[tmp_path / "prompts.jsonl"]), tmp_path)
    (tmp_path / "model" / "config.json").write_text("{ }")
    with pytest.raises(UsageError, match="model: the run was made with 44136fa355b3"):
        refuse_drift(made, Asked(model=str(tmp_path / "model")), tmp_path)


def test_all_differences_are_shown_at_once(made, tmp_path):
    with pytest.raises(UsageError) as caught:
        refuse_drift(made, Asked(layers=(1,), dtype="float32", format="other"), tmp_path)
    assert all(word in str(caught.value) for word in ("layers", "dtype", "format"))


def test_prompts_in_another_order_are_others(made, tmp_path):
    (tmp_path / "more.jsonl").write_text("{}\n")
    both = [tmp_path / "prompts.jsonl", tmp_path / "more.jsonl"]
    two = replace(made, sources=tuple(map(source_of, both)))
    refuse_drift(two, Asked(prompts=both), tmp_path)
    with pytest.raises(UsageError, match="prompts"):
        refuse_drift(two, Asked(prompts=both[::-1]), tmp_path)
    with pytest.raises(UsageError, match="prompts"):
        refuse_drift(two, Asked(prompts=both[:1]), tmp_path)


def test_a_source_is_read_in_pieces(tmp_path):
    path = tmp_path / "big"
    body = bytes(range(256)) * 10_000
    path.write_bytes(body)
    found = source_of(path)
    assert (found.nbytes, found.sha256) == (len(body), hashlib.sha256(body).hexdigest())


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_source_that_can_not_be_read_is_named(tmp_path, name):
    with pytest.raises(PromptsError, match="--prompts"):
        source_of(tmp_path / name)


def test_an_output_that_holds_anything_is_refused(tmp_path):
    refuse_used_output(tmp_path / "missing")
    (tmp_path / "out").mkdir()
    refuse_used_output(tmp_path / "out")
    (tmp_path / "out" / ".hidden").touch()
    with pytest.raises(UsageError, match="not empty"):
        refuse_used_output(tmp_path / "out")
    with pytest.raises(UsageError, match="is a file"):
        refuse_used_output(tmp_path / "out" / ".hidden")
