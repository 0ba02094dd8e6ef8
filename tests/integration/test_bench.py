"""The benchmark runs and says what it promises; never how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_models import make_tiny_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            ["journal", "--rows", "1000"],
            {"transitions_single", "transitions_batched", "resume_s", "status_s", "claim_p99_ms"},
        ),
        (["reconcile", "--directories", "80"], {"reconcile_10k_s"}),
        (
            ["supervisor", "--seconds", "2", "--dumps", "200"],
            {"supervisor_rss_mb", "supervisor_cpu_percent", "done_seen_p99_ms"},
        ),
        (
            ["handover", "--sustained", "0.02", "--dirty", "0.02", "--sample-tokens", "174", "--longest-tokens", "0"],
            {
                "written_vs_dd",
                "written_vs_dd_2",
                "written_vs_incident",
                "sustained_vs_incident",
                "verified_vs_dd",
                "verified_vs_incident",
                "cpu_s_per_gb_written",
                "cpu_s_per_gb_verified",
                "lock_held_s_per_gb_written",
                "lock_held_s_per_gb_verified",
                "rss_growth_mb",
                "rss_growth_more_mb",
                "dirty_rise_mb",
            },
        ),
        (
            ["onlookers", "--rows", "300", "--calls", "3", "--every", "0"],
            {"onlooked_vs_alone", "wal_mb_onlooked", "status_live_s", "status_crashed_s"},
        ),
        (
            ["scaling", "--concurrency", "2", "--total", "0.03", "--tokens-each", "174", "--dd-mib", "16", "--profile"],
            set(),
        ),
    ],
)
def test_bars_are_measured_and_written_in_the_agreed_form(tmp_path, arguments, names):
    target = tmp_path / "bars.json"
    command = [sys.executable, str(BENCHMARKS), *arguments, "--rounds", "1", "--json", str(target)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode in (0, 1), done.stderr  # 1: a bar was missed
    told = json.loads(target.read_text())
    assert {"machine", "versions", "bars"} <= set(told)
    assert {bar["name"] for bar in told["bars"]} == names
    for bar in told["bars"]:
        assert set(bar) == {"name", "value", "goal", "better", "met"}
        met = bar["value"] >= bar["goal"] if bar["better"] == "higher" else bar["value"] <= bar["goal"]
        assert bar["met"] is met
        assert bar["name"] in done.stdout
    assert (done.returncode == 0) == all(bar["met"] for bar in told["bars"])
    assert [p.name for p in tmp_path.iterdir()] == ["bars.json"], "it cleans up"


def test_memory_is_no_disk():
    command = [sys.executable, str(BENCHMARKS), "journal", "--rows", "1000", "--folder", "/dev/shm"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "is tmpfs: nothing is synced there" in done.stderr


def test_the_job_is_held_beside_a_plain_forward(tmp_path):
    model = make_tiny_model("llama", tmp_path / "model")
    target = tmp_path / "bars.json"
    command = [sys.executable, str(BENCHMARKS), "job", "--model", str(model), "--prompts", "3", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--json", str(target)],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode in (0, 1), done.stderr
    (bar,) = json.loads(target.read_text())["bars"]
    assert (bar["name"], bar["goal"], bar["better"]) == ("job_vs_forward", 0.95, "higher")
    assert bar["value"] > 0
