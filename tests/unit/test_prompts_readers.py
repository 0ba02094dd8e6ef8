"""JSON Lines as streams: line numbers, tolerated oddities, and files that can't be used at all."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hsjournal.errors import ExitCode, PromptsError
from hsjournal.prompts import readers
from hsjournal.prompts.readers import JsonLines, Line
from hsjournal.prompts.refusal import RowRefusedError
from hsjournal.prompts.sources import open_sources


def read(tmp_path: Path, data: bytes) -> list[tuple[int, object]]:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(data)
    return [(line.number, value_of(line)) for line in JsonLines(file, file.name)]


def value_of(line: Line) -> dict[str, Any] | str:
    try:
        return line.parse()
    except RowRefusedError as error:
        return str(error)


def test_lines_end_at_newline_bytes_only(tmp_path):
    odd = "a\u2028b\u2029c\x85d\x0be\x0cf"
    data = json.dumps({"text": odd}, ensure_ascii=False).encode() + b'\n{"text":"next"}'
    assert read(tmp_path, data) == [(1, {"text": odd}), (2, {"text": "next"})]


def test_blank_lines_count_in_the_numbering_and_are_no_rows(tmp_path):
    assert read(tmp_path, b'\n \t\r\n{"a":1}\n\n\r\n{"a":2}\n\n') == [(3, {"a": 1}), (6, {"a": 2})]


def test_crlf_and_a_bom_at_the_start_are_tolerated(tmp_path):
    assert read(tmp_path, b'\xef\xbb\xbf{"a":1}\r\n{"a":2}\r\n') == [(1, {"a": 1}), (2, {"a": 2})]


def test_a_bom_alone_is_a_blank_line_and_one_further_down_is_broken_json(tmp_path):
    (second,) = read(tmp_path, b"\xef\xbb\xbf\n\xef\xbb\xbf{}\n")
    assert second[0] == 2
    assert str(second[1]).startswith("broken_json: Unexpected UTF-8 BOM")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a":', "broken_json: Expecting value at character 6"),
        (b"not json", "broken_json: Expecting value at character 1"),
        (b'{"a":1} x', "broken_json: Extra data at character 9"),
        (b"[1]", "broken_json: not a JSON object"),
        (b'"text"', "broken_json: not a JSON object"),
        (b"null", "broken_json: not a JSON object"),
        (b'{"a":NaN}', "broken_json: NaN is not JSON"),
        (b'{"a":-Infinity}', "broken_json: -Infinity is not JSON"),
        (b'{"a":1,"a":2}', "broken_json: a key stands twice"),
        (b'{"a":{"b":1,"b":1}}', "broken_json: a key stands twice"),
        (b"\x00\x00", "broken_json: Expecting value at character 1"),
        (b'{"a":"\xff"}', "broken_unicode: not UTF-8: invalid start byte at byte 7"),
        (b'{"a":"\xed\xa0\x80"}', "broken_unicode: not UTF-8: invalid continuation byte at byte 7"),
        (b"[" * 200_000, "broken_json: nested too deeply"),
    ],
)
def test_a_broken_line_is_refused_alone_with_its_number(tmp_path, line, reason):
    assert read(tmp_path, b'{"a":1}\n' + line + b'\n{"a":2}\n') == [(1, {"a": 1}), (2, reason), (3, {"a": 2})]


def test_a_line_beyond_the_limit_is_passed_over_and_the_numbers_stay_true(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 100)
    long = b'{"a":"' + b"x" * 3_000_000 + b'"}'
    exact = b'{"a":"' + b"y" * 92 + b'"}'
    assert len(exact) == 100
    assert read(tmp_path, b"{}\n" + long + b"\n" + exact + b"\n" + long) == [
        (1, {}),
        (2, "line_too_long: more than 100 bytes"),
        (3, {"a": "y" * 92}),
        (4, "line_too_long: more than 100 bytes"),
    ]


def test_the_digest_is_of_the_bytes_that_were_read(tmp_path):
    data = b"\xef\xbb\xbf{}\r\n\n{broken\n" + b'{"text":"x"}'
    file = tmp_path / "p.jsonl"
    file.write_bytes(data)
    source = JsonLines(file, "p.jsonl")
    assert source.bytes_read == 0
    assert len(list(source)) == 3
    identity = source.identity()
    assert (identity.path, identity.nbytes, identity.sha256) == (str(file), len(data), hashlib.sha256(data).hexdigest())
    assert source.bytes_read == len(data)


def test_a_foreign_or_unusable_file_is_refused_as_a_whole_by_name(tmp_path):
    cases = {
        "empty.jsonl": (b"", "is empty"),
        "a.xz": (b"\xfd7zXZ\x00", "compressed with xz"),
        "a.zip": (b"PK\x03\x04....", "a zip archive"),
        "a.arrow": (b"ARROW1\x00\x00", "an Arrow file"),
        "a.parquet": (b"PAR1....PAR1", "its footer"),
        "a.txt": ('{"a":1}'.encode("utf-16"), "text in UTF-16"),
    }
    for name, (data, what) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(PromptsError) as caught:
            open_sources([str(tmp_path / name)])
        assert name in caught.value.message
        assert what in caught.value.message
        assert caught.value.remedy
        assert caught.value.exit_code == ExitCode.USAGE


def test_nothing_but_a_regular_file_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    for name, what in [("pipe", "not a regular file"), (".", "a folder"), ("missing", "No such file")]:
        with pytest.raises(PromptsError, match=what):
            open_sources([str(tmp_path / name)])


def test_sources_have_distinct_names(tmp_path):
    files = [tmp_path / "a" / "p.jsonl", tmp_path / "b" / "p.jsonl", tmp_path / "q.jsonl"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"{}\n")
    assert [s.name for s in open_sources([str(f) for f in files])] == [str(files[0]), str(files[1]), "q.jsonl"]


def test_one_file_named_twice_is_refused_also_through_a_link(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"{}\n")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "p.jsonl")
    with pytest.raises(PromptsError, match="named twice"):
        open_sources([str(tmp_path / "p.jsonl"), str(tmp_path / "link.jsonl")])
    with pytest.raises(PromptsError, match="no prompts file"):
        open_sources([])


def test_a_file_name_that_is_not_utf8_is_escaped_in_names(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.jsonl"
    with open(path, "wb") as file:
        file.write(b"{}\n")
    (source,) = open_sources([os.fsdecode(path)])
    assert source.name == "\\xff.jsonl"
    assert [line.number for line in source] == [1]
