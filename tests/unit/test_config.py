"""Places, manifest and settings of a run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hsjournal.config import SHM_VARIABLE, Manifest, RunPaths, Settings, Source
from hsjournal.errors import ExitCode, NoJournalError, SchemaError

MANIFEST = Manifest(
    run_id="abcd1234", created="2026-01-02T03:04:05+00:00", version="0.1", model='/models/"odd" ☃', model_sha256="a" * 64,
    tokenizer_sha256="", hidden_size=7168, num_layers=61, vocab_size=163_840, context_length=262_144,
    capture_layers=(1, 30, 57), dtype="bfloat16", final_norm="post", format="specforge", out_dir="/out", engine="sglang",
    chunk_size=8192, sources=(Source("a\\b.jsonl", 5, "f" * 64), Source("c.jsonl", 0, "0" * 64)), options={"server": "http://h:1"},
)  # fmt: skip


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "manifest.toml"
    path.write_text(MANIFEST.to_toml())
    return path


def test_a_manifest_comes_back_as_it_was(path):
    loaded = Manifest.load(path)
    assert loaded == MANIFEST
    assert hash(loaded.capture_layers) == hash(MANIFEST.capture_layers)


def test_a_missing_one_says_how_to_start(tmp_path):
    with pytest.raises(NoJournalError, match="hsjournal run") as caught:
        Manifest.load(tmp_path / "manifest.toml")
    assert caught.value.exit_code is ExitCode.NO_JOURNAL


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2] + '"',
        lambda text: "\0" + text,
        lambda text: "new_key = 1\n" + text,
        lambda text: text.replace('dtype = "bfloat16"\n', ""),
        lambda text: text.replace("nbytes = 5", "size = 5"),
        lambda text: text.replace("capture_layers = [", 'capture_layers = ["x",'),
        lambda _text: "",
    ],
    ids=["cut", "control character", "unknown key", "missing key", "another source", "no numbers", "empty"],
)
def test_what_is_none_is_refused_with_exit_12(path, change):
    path.write_text(change(MANIFEST.to_toml()))
    with pytest.raises(SchemaError) as caught:
        Manifest.load(path)
    assert caught.value.exit_code is ExitCode.SCHEMA
    assert str(path) in str(caught.value)


def test_bytes_that_are_no_text_are_refused(path):
    path.write_bytes(b"\xff\xfe" + path.read_bytes())
    with pytest.raises(SchemaError):
        Manifest.load(path)


def test_settings_travel_as_one_line(path):
    settings = replace(Settings(server_url="http://h:1", handover_root="/dev/shm/ ☃\n"), pause_limit=0.5, max_strikes=7)
    assert Settings.from_json(settings.to_json()) == settings
    assert "\n" not in settings.to_json()


def test_places_are_absolute_and_touch_no_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = RunPaths.of("a/../run")
    assert paths.run_dir == tmp_path / "run"
    assert paths == RunPaths.of(tmp_path / "run")
    names = ("journal", "manifest", "logs", "rejects", "default_out", "supervisor_lock", "worker_lock")
    assert len({getattr(paths, name) for name in names}) == len(names)
    assert all(getattr(paths, name).parent == paths.run_dir for name in names)
    assert list(tmp_path.iterdir()) == []


def test_the_mirror_lies_in_tmpfs_apart_for_each_run_and_user(tmp_path, monkeypatch):
    monkeypatch.setenv(SHM_VARIABLE, str(tmp_path / "shm"))
    one, two = RunPaths.of(tmp_path / "one"), RunPaths.of(tmp_path / "two")
    assert one.shm != two.shm
    assert one.shm.parent == tmp_path / "shm" / f"hsjournal-{os.getuid()}"
    assert {one.mirror.parent, one.default_handover_root.parent} == {one.shm}
    monkeypatch.delenv(SHM_VARIABLE)
    assert one.shm.parts[:3] == ("/", "dev", "shm")
    assert one.shm.name == RunPaths.of(tmp_path / "one").shm.name


def test_a_name_that_is_no_unicode_has_its_place(tmp_path):
    odd = RunPaths.of(Path(os.fsdecode(bytes(tmp_path) + b"/\xff")))
    assert len(odd.shm.name) == 16
