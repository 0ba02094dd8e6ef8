"""What people see: it adds up, it fits, and no text from outside reaches the terminal as it is."""

from __future__ import annotations

import io
import re
import threading
import time
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, Group

from hsjournal.fleet.telling import Telling
from hsjournal.ui.fleet import LiveFleet
from hsjournal.ui.frame import frame
from hsjournal.ui.history import STEP_S, History
from hsjournal.ui.live import LiveScreen
from hsjournal.ui.plain import PlainScreen, forecast_lines, status_line
from hsjournal.ui.status import status_text
from hsjournal.ui.words import duration, printable, size
from hsjournal.watch.presence import Presence, Watched, verdict_on
from hsjournal.watch.view import View

EVIL = "\x1b[2J\x1b]0;owned\x07\r\n[bold]x[/bold] \u202e ☃ 输出 e\u0301 " + "y" * 300
WIDE = "输出文件夹所在的磁盘已满。" * 6 + "请腾出空间"


def snapshot(**changes: Any) -> dict[str, Any]:
    counts = {"pending": 20, "sent": 5, "dumped": 3, "written": 2, "verified": 60, "failed": 1, "skipped": 9}
    rates = {"samples_per_s": 1.5, "tokens_per_s": 2582.0, "bytes_per_s": 148e6}
    return {
        "counts": {state: {"rows": rows, "tokens": rows * 10, "bytes": 0} for state, rows in counts.items()},
        "rates": rates | {f"{k}_overall": v for k, v in rates.items()},
        "eta_s": 3725.0,
        "progress_age_s": 2.0,
        "pauses": {},
        "in_flight": [
            {"row": i, "sample_id": EVIL, "attempt": 1, "tokens": 6065, "phase": "writing", "age_s": 3.0}
            for i in range(9)
        ],
    } | changes


def drawn(view: View, width: int, height: int = 50, *, colour: bool = False) -> str:
    out = io.StringIO()
    kind: dict[str, Any] = {"force_terminal": True, "color_system": "truecolor"} if colour else {"color_system": None}
    console = Console(file=out, width=width, height=height, **kind)
    console.print(Group(*frame(view, History(), width, height)))
    return out.getvalue()


def busy(**changes: Any) -> View:
    """Everything at once, and text from outside wherever there may be some."""
    told = {"url": EVIL, "up": False, "problem": EVIL, "in_flight": 3}
    snap = snapshot(
        servers=[told, told | {"up": True, "problem": None}],
        handover={"reserved": 2e9, "available": 6e10, "budget": 64 << 30},
        volumes=[{"path": EVIL, "free": 1e12, "problem": EVIL}],
        pauses={"output": EVIL},
    )
    finding = {"verdict": "storage_stalled", "sentence": EVIL, "way_out": EVIL}
    view = View(
        stage="running",
        sentence=EVIL,
        run_dir="/r" * 100,
        out_dir=EVIL,
        snapshot=snap,
        events=[EVIL] * 30,
        verdict=finding,
    )
    for name, value in changes.items():
        setattr(view, name, value)
    return view


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (40, 12), (300, 10), (20, 3)])
@pytest.mark.parametrize("changes", [{}, {"verdict": None}, {"snapshot": snapshot(in_flight=[])}, {"snapshot": None}])
def test_no_line_breaks_and_none_is_lost_below(width: int, height: int, changes: dict[str, Any]) -> None:
    lines = drawn(busy(**changes), width, height).splitlines()
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("width", [80, 160])
def test_a_sentence_in_a_wide_script_is_shown_to_its_end(width: int) -> None:
    view = View(stage="running", snapshot=snapshot(pauses={"output": WIDE}))
    lines = drawn(view, width).splitlines()
    assert max(map(cell_len, lines)) <= width
    first = next(number for number, line in enumerate(lines) if line.startswith("PAUSED"))
    shown = "".join(line[9:].strip() for line in lines[first : first + 3])
    assert shown.startswith(WIDE)


def test_what_is_waited_for_is_said_once() -> None:
    why = "the output folder /o is full"
    finding = {"verdict": "waiting", "sentence": why, "way_out": "it goes on by itself"}
    view = View(
        stage="running", run_dir="/r", out_dir="/r/out", verdict=finding, snapshot=snapshot(pauses={"output": why})
    )
    text = drawn(view, 80, 23)
    assert text.count(why) == 1
    assert "waiting: see PAUSED" in text
    assert "/r → out" in text


def test_a_sentence_without_end_ends_with_an_ellipsis() -> None:
    view = View(stage="running", snapshot=snapshot(pauses={"output": "word " * 60}))
    lines = [line for line in drawn(view, 80).splitlines() if "word" in line]
    assert len(lines) == 3
    assert lines[-1].endswith("…")


def test_the_frame_shows_what_matters_at_80_by_24() -> None:
    finding = {"verdict": "storage_stalled", "sentence": "sink-0 waits", "way_out": "mend the disk"}
    text = drawn(busy(verdict=finding), 80, 23)
    for word in ("60 verified", "20 pending", "1 failed", "of 100", "storage stalled", "PAUSED", "148.0 MB/s", "1 h 02 min",
                 "full in 1 h 52 min", "60.0 GB free", "in flight (9, 2 shown)"):  # fmt: skip
        assert word in text, word


def test_a_snapshot_of_long_ago_gives_no_speed_and_its_ages_go_on() -> None:
    """A worker that was stopped two hours ago: nothing on the screen looks as if it moved."""
    old = snapshot(
        monotonic=time.monotonic() - 7200,
        pauses={"output": "the output is full"},
        handover={"root": "/shm/a", "reserved": 2e9, "available": 6e10, "budget": 64 << 30},
        volumes=[{"path": "/out", "free": 1e12, "problem": None}],
    )
    worker = {"alive": False, "pid": 7, "epoch": 3, "phase": "running", "beat_age_s": 7201.0}
    view = View(stage="running", snapshot=old, worker=worker, lives=3)
    for text in (drawn(view, 80, 23), status_line(view)):
        assert "2 h 00 min ago" in text
        assert "samples/s" not in text
        assert "at this speed" not in text
        assert "PAUSED" not in text
        assert "told nothing for 2 h 00 min" in text
    text = drawn(view, 80, 23)
    assert "worker   DEAD, last beat 2 h 00 min ago; pid 7, start 3" in text
    assert "2 h 00 min  " in text.split("in flight")[1], "the row in flight"
    fresh = snapshot(monotonic=time.monotonic() - 3.0)
    worker |= {"alive": True, "beat_age_s": 0.2}
    text = drawn(View(stage="running", snapshot=fresh, worker=worker, lives=3), 80, 23)
    assert "last progress 5 s ago" in text
    assert "1.50 samples/s" in text
    assert "worker   running, last beat 0 s ago; pid 7, start 3" in text


def test_each_hand_over_root_has_its_room_and_its_time_until_full() -> None:
    history = History()
    now = time.monotonic()
    for second in (30, 20, 10, 0):
        roots = [
            {"root": f"/shm/{n}", "reserved": 2e9, "available": 1e9 + n * second * 1e7} for n in range(3)
        ]  # the first does not fill
        servers = [{"url": "u", "up": True, "handover": root} for root in (*roots, roots[2])]
        snap = snapshot(monotonic=now - second, servers=servers, handover=roots[0] | {"budget": 4e9}, volumes=[])
        history.note(snap)
    lines = [str(line) for line in frame(View(stage="running", snapshot=snap), history, 120, 50)]
    assert [line for line in lines if line.startswith("shm")] == [
        "shm      2.0 GB of 4.0 GB in use, 1.0 GB free; /shm/0",
        "shm      2.0 GB of 4.0 GB in use, 1.0 GB free, full in 1 min 40 s at this speed; /shm/1",
        "shm      2.0 GB of 4.0 GB in use, 1.0 GB free, full in 50 s at this speed; /shm/2",
    ]


def test_lists_share_the_room_and_the_newest_event_is_shown() -> None:
    view = busy(events=[f"event {n}" for n in range(30)])
    few, many = drawn(view, 100, 30), drawn(view, 100, 80)
    assert "event 29" in few
    assert "event 0" not in few
    assert "row 8" in many
    assert "event 0" in many


def test_the_bar_adds_up() -> None:
    bar = drawn(View(stage="running", snapshot=snapshot()), 100).splitlines()[2]
    assert len(bar) == 100
    assert {letter: bar.count(letter) for letter in "█▓▒░·!-"} == dict(
        zip("█▓▒░·!-", (60, 2, 3, 5, 20, 1, 9), strict=True)
    )


def at(second: float, tokens: int) -> dict[str, Any]:
    snap = snapshot(monotonic=second)
    snap["counts"]["verified"]["tokens"] = tokens
    return snap


def test_the_sparkline_is_the_throughput() -> None:
    history = History()
    for step, tokens in enumerate((0, 100, 300, 300, 700)):
        history.note(at(1000 + step * STEP_S, tokens))
    assert history.sparkline(80) == "▂▄_█"
    assert history.sparkline(2) == "_█"
    assert History().sparkline(80) == ""


def test_the_sparkline_survives_silence_repeats_and_a_new_journal() -> None:
    history = History()
    history.note(at(1000, 0))
    history.note(at(1000 + 4 * STEP_S, 400))  # nothing was told for four steps
    history.note(at(1000 + 4 * STEP_S, 400))
    history.note(at(5, 0))  # the machine was booted
    history.note(at(5 + STEP_S, 50))
    assert history.sparkline(80) == "████▄"


def test_the_time_to_the_end_has_a_spread() -> None:
    steady, rough = History(), History()
    for step in range(40):
        steady.note(at(1000 + step * STEP_S, 1000 * step))
        rough.note(at(1000 + step * STEP_S, 1000 * step + (900 if step % 2 else 0)))
    assert History().spread(at(0, 0)) is None
    left = sum(snapshot()["counts"][s]["tokens"] for s in ("pending", "sent", "dumped", "written"))
    assert steady.spread(at(0, 0)) == pytest.approx((left / 100, left / 100))
    low, high = rough.spread(at(0, 0)) or (0, 0)
    assert low < left / 100 < high


@pytest.mark.parametrize("colour", [False, True])
def test_text_from_outside_is_made_harmless(colour: bool) -> None:
    paused = {"output": EVIL}
    text = drawn(busy(), 80, colour=colour)
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text
    assert "\u202e" not in text
    assert "[bold]" in text  # shown, not obeyed
    plain = status_line(View(stage="running", snapshot=snapshot(pauses=paused)))
    assert plain.isprintable()


def test_plain_lines_hold_no_escape_and_come_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    screen = PlainScreen(out)
    for _ in range(45):
        screen.show(View(stage="running", sentence="worker 1", snapshot=snapshot()))
        now[0] += 0.5
    assert len(out.getvalue().splitlines()) == 3
    assert "\x1b" not in out.getvalue()
    assert "60/100 verified" in out.getvalue()
    assert "1 h 02 min" in out.getvalue()


def test_a_pause_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    out = io.StringIO()
    screen = PlainScreen(out)
    screen.show(View(stage="running", snapshot=snapshot()))
    screen.show(View(stage="running", snapshot=snapshot(pauses={"output": "the output folder /o is full"})))
    assert "PAUSED: the output folder /o is full" in out.getvalue().splitlines()[-1]


def test_quiet_says_nothing() -> None:
    out = io.StringIO()
    PlainScreen(out, quiet=True).show(View(stage="running", snapshot=snapshot()))
    assert out.getvalue() == ""


def test_a_hundred_views_in_a_second_are_four_frames_at_most() -> None:
    out = io.StringIO()
    screen = LiveScreen(Console(file=out, force_terminal=True, width=80))
    begin = time.monotonic()
    for number in range(100):
        screen.show(View(stage="running", sentence=f"view {number}", snapshot=snapshot()))
        time.sleep(0.01)
    frames = len(set(re.findall(r"view \d+", out.getvalue())))
    assert 2 <= frames <= 1 + 4 * (time.monotonic() - begin)
    screen.close()


class Held(io.StringIO):
    """A terminal that takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def write(self, text: str) -> int:
        self.free.wait(30)
        return super().write(text)


def test_a_terminal_that_takes_nothing_holds_nobody_up_and_frames_are_dropped() -> None:
    out = Held()
    screen = LiveScreen(Console(file=out, force_terminal=True, width=80))
    begin = time.monotonic()
    for number in range(8):
        screen.show(View(stage="running", sentence=f"view {number}", snapshot=snapshot()))
        time.sleep(0.3)
    assert time.monotonic() - begin < 8
    out.free.set()
    screen.close()
    assert set(re.findall(r"view \d+", out.getvalue())) == {"view 0"}


def test_the_fleet_s_table_shows_who_needs_to_be_seen_and_gives_the_terminal_back() -> None:
    out = io.StringIO()
    screen = LiveFleet(Console(file=out, force_terminal=True, width=100, height=12))
    counts = {"verified": 3, "pending": 2}
    tellings = [Telling(f"{n}/40", 1, f"node-{n}", "/r", "running: worker 7", counts, 0.5) for n in range(1, 41)]
    tellings[30] = Telling("31/40", 2, "node-31", "/r", f"gave up {EVIL}", counts, 0.0, 4)
    screen.show(tellings)
    screen.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "gave up" in text
    assert "and 33 more" in text
    assert "1 of 40 shards ended, 39 under way" in text
    assert max(map(cell_len, text.splitlines())) <= 100
    assert "\x1b[2J" not in out.getvalue()
    assert out.getvalue().rstrip().endswith("\x1b[?25h")


def test_the_live_screen_gives_the_terminal_back_after_an_error() -> None:
    out = io.StringIO()
    screen = LiveScreen(Console(file=out, force_terminal=True, width=80))
    try:
        screen.show(View(stage="running", snapshot=snapshot()))
    finally:
        screen.close()
    screen.close()
    assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_the_forecast_names_what_was_refused() -> None:
    lengths = {"p50": 1, "p90": 2, "p99": 3, "longest": 4}
    lines = forecast_lines(
        {
            "rows": 37_312, "tokens": 87_800_000, "skipped": {"too_long": 3}, "lengths": lengths,
            "output_bytes": 5.03e12, "free_bytes": 6e12, "largest_dump_bytes": 347_797_356,
        }
    )  # fmt: skip
    assert "37,312 samples" in lines[0]
    assert "3 too_long" in lines[0]
    assert "5.0 TB" in lines[2]


def test_status_says_dead_when_the_supervisor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {
        "run_dir": "/r", "out_dir": "/o", "rows": 100, "complete": False, "counts": snapshot()["counts"],
        "supervisor": {"alive": False, "state": "dead"}, "events": [],
        "failed": [{"row": 3, "sample_id": EVIL, "reason": EVIL}],
        "verdict": verdict_on(Watched(Presence.DEAD), complete=False),
    }  # fmt: skip
    text = status_text(state)
    assert "DEAD" in text
    assert "hsjournal resume" in text
    assert "\x1b" not in text
    assert "total             100" in text


def test_numbers_in_words() -> None:
    assert [size(n) for n in (0, 999, 1500, 5.03e12)] == ["0 B", "999 B", "1.5 kB", "5.0 TB"]
    assert [duration(s) for s in (0, 59.6, 3599, 3600, 90_000, None)] == [
        "0 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "1 d 01 h", "unknown",
    ]  # fmt: skip
    assert printable("a\x00b", 10) == "a·b"
    assert len(printable("z" * 50, 10)) == 10
