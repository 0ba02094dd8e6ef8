"""Inline SVG: an area over time with marks under it, bars, and a strip of small cells. Everything is escaped here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 960, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 8, 10, 24


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at one moment.

    Args:
        at: seconds since 1970.
        lane: the line that it stands on.
        words: shown when pointed at.
    """

    at: float
    lane: str
    words: str


def area(
    points: Sequence[tuple[float, float, float]],
    words: Callable[[float], str],
    marks: Sequence[Mark] = (),
    lanes: Sequence[str] = (),
) -> str:
    """Values over time as steps, and below them the marks, a lane for each kind.

    Args:
        points: start, seconds and value of each step; times in seconds since 1970, ascending.
        words: a value in words, for the axis.
        marks: those outside the time of the steps widen it.
        lanes: names, top down.
    """
    lane_height = 16
    height = HEIGHT + lane_height * len(lanes) + 6
    first = min([points[0][0], *(m.at for m in marks)])
    last = max([points[-1][0] + points[-1][1], *(m.at for m in marks)])
    span = max(last - first, 1.0)
    top = _nice(max(value for _, _, value in points))
    floor = HEIGHT - _BOTTOM

    def x(at: float) -> float:
        return _LEFT + (at - first) / span * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return floor - value / top * (floor - _TOP)

    path = f"M{x(points[0][0]):.1f} {floor}"
    for at, seconds, value in points:
        path += f"L{x(at):.1f} {y(value):.1f}L{x(at + seconds):.1f} {y(value):.1f}"
    path += f"L{x(points[-1][0] + points[-1][1]):.1f} {floor}Z"
    parts = [_grid(top, words, y), f'<path class="area" d="{path}"/>', _clock(first, span, x, height)]
    for number, lane in enumerate(lanes):
        base = HEIGHT + lane_height * number + 8
        parts.append(f'<text class="axis" x="{_LEFT - 6}" y="{base + 4}" text-anchor="end">{escape(lane)}</text>')
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
        parts += [
            f'<circle class="mark {escape(lane)}" cx="{x(mark.at):.1f}" cy="{base}" r="5"><title>{escape(mark.words)}</title></circle>'
            for mark in marks
            if mark.lane == lane
        ]
    return _svg(WIDTH, height, parts)


def bars(groups: Sequence[tuple[str, float]], words: Callable[[float], str], width: int = WIDTH // 2 - 12) -> str:
    """A bar for each name, in order."""
    top = _nice(max(value for _, value in groups))
    floor = HEIGHT - _BOTTOM
    step = (width - _LEFT - _RIGHT) / len(groups)
    every = max(1, math.ceil(len(groups) * 44 / (width - _LEFT)))

    def y(value: float) -> float:
        return floor - value / top * (floor - _TOP)

    parts = [_grid(top, words, y, width)]
    for number, (name, value) in enumerate(groups):
        left = _LEFT + step * number
        parts.append(
            f'<rect class="bar" x="{left + 1:.1f}" width="{max(1.0, step - 2):.1f}" y="{y(value):.1f}" '
            f'height="{floor - y(value):.1f}"><title>{escape(name)}: {escape(words(value))}</title></rect>'
        )
        if number % every == 0:
            parts.append(
                f'<text class="axis" x="{left + step / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(name)}</text>'
            )
    return _svg(width, HEIGHT, parts)


def strip(values: Mapping[int, int], cells: int) -> str:
    """``cells`` small squares, each as strong as its value: a broken kernel tile shows as one strong cell."""
    most = max(values.values(), default=1)
    size = 10
    parts = [
        f'<rect class="cell" x="{n * size}" y="0" width="{size - 1}" height="14" '
        f'fill-opacity="{0.08 + 0.92 * values.get(n, 0) / most:.2f}"><title>{n}: {values.get(n, 0)}</title></rect>'
        for n in range(cells)
    ]
    return _svg(cells * size, 14, parts)


def stack(parts: Sequence[tuple[str, int]]) -> str:
    """One bar of several parts side by side; a part that is there is at least seen."""
    total = sum(value for _, value in parts) or 1
    x, drawn = 0.0, []
    for name, value in parts:
        if value:
            width = max(2.0, value / total * WIDTH)
            drawn.append(
                f'<rect class="state {escape(name)}" x="{x:.1f}" y="0" width="{width:.1f}" height="26">'
                f"<title>{escape(name)}: {value:,}</title></rect>"
            )
            x += width
    return _svg(max(WIDTH, math.ceil(x)), 26, drawn)


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _grid(top: float, words: Callable[[float], str], y: Callable[[float], float], width: int = WIDTH) -> str:
    lines = []
    for quarter in range(5):
        value = top * quarter / 4
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        lines.append(
            f'<text class="axis" x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{escape(words(value))}</text>'
        )
    return "".join(lines)


def _clock(first: float, span: float, x: Callable[[float], float], height: int) -> str:
    form = "%d %b %H:%M" if span > 20 * 3600 else "%H:%M" if span > 20 * 60 else "%H:%M:%S"
    ticks = 6
    labels = []
    for number in range(ticks + 1):
        at = first + span * number / ticks
        anchor = "start" if number == 0 else "end" if number == ticks else "middle"
        label = time.strftime(form, time.gmtime(at))
        labels.append(f'<text class="axis" x="{x(at):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{label}</text>')
        for above, below in ((_TOP, HEIGHT - _BOTTOM), (HEIGHT - 2, height - 6)):  # not through the label
            if below > above:
                labels.append(f'<line class="grid" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{above}" y2="{below}"/>')
    return "".join(labels)


def _nice(value: float) -> float:
    """The next round number above ``value``, divisible by four for the grid."""
    if value <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)
