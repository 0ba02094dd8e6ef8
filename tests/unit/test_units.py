"""Sizes and times as people write them."""

from __future__ import annotations

import pytest

from hsjournal.units import parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("1000", 1000), ("1k", 1000), ("1KiB", 1024), ("64GiB", 64 << 30), ("5TB", 5 * 10**12), ("1.5 GB", 1_500_000_000), ("7B", 7), (" 2Gi ", 2 << 30)],
)  # fmt: skip
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1iB", "1e9", "0x10", "1GiBs", "nan", "٣"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="64GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("0.5", 0.5), ("500ms", 0.5), ("20min", 1200), ("20 m", 1200), ("1h30m", 5400), ("1h 30min 5s", 5405), ("2d", 172_800)],
)  # fmt: skip
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "h", "-1s", "1y", "1h foo", "foo 1h", "1h,30m", "inf"])
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError, match="1h30m"):
        parse_seconds(text)
