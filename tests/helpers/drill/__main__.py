"""``scripts/drill kill`` and ``campaign``, each with ``--n N --seed S``, and ``incident``; the last line is one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers.drill.incident import incident_drill
from tests.helpers.drill.kill import kill_drill
from tests.helpers.drill.mixed import campaign
from tests.helpers.drill.report import Report
from tests.helpers.tiny_models import make_tiny_model


def summary(report: Report, seconds: float) -> dict[str, object]:
    """The drill's last line."""
    return {
        "kills": report.kills,
        "rows": report.rows,
        **report.findings.counts(),
        "struck": report.struck,
        "seconds": round(seconds, 1),
        "points": dict(sorted(report.points.items())),
        "targets": dict(sorted(report.targets.items())),
    }


def run_campaign(options: argparse.Namespace) -> int:
    """The campaign; 0 when it found nothing."""
    begin = time.monotonic()
    real = min(options.n, max(60, options.n // 8)) if options.real is None else options.real
    with (
        tempfile.TemporaryDirectory(prefix="hsj-drill-model-") as folder,
        tempfile.TemporaryDirectory(prefix="hsj-drill-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as shm,
    ):
        os.environ["HSJOURNAL_SHM"] = shm  # mirrors of the part in this process
        model = make_tiny_model("llama", Path(folder), seed=3)
        found = campaign(model, real, options.n - real, options.seed, options.base)
    for line in found.lines():
        print(line)
    print(
        f"{sum(found.real.values())} faults on real processes, {found.freezes} real freezes among them; "
        f"{sum(found.in_process.values())} in this process, on the real worker, store, reader and sink, or the judge alone"
    )
    seconds = time.monotonic() - begin
    print(f"{seconds / 60:.1f} minutes")
    print(json.dumps(found.summary() | {"seconds": round(seconds, 1)}))
    return 1 if found.lines() else 0


def run_incident(options: argparse.Namespace) -> int:
    """The incident; 0 when it went as it must."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hsj-drill-model-") as folder:
        told = incident_drill(make_tiny_model("llama", Path(folder), seed=3), options.base)
    print("\n".join(told.line))
    print(json.dumps(told.facts | {"faults": told.faults, "seconds": round(time.monotonic() - begin, 1)}))
    return 1 if told.faults else 0


def main(arguments: list[str]) -> int:
    """Run a drill; 0 when it found nothing."""
    parser = argparse.ArgumentParser(
        prog="scripts/drill", description="Kill everything, everywhere, and see what is true at the end."
    )
    commands = parser.add_subparsers(dest="drill", required=True)
    kill = commands.add_parser("kill", help="SIGKILLs at random moments and at every named point, then a last resume")
    kill.add_argument("--n", type=int, default=80, help="kills (default: %(default)s)")
    kill.add_argument("--seed", type=int, default=7)
    kill.add_argument("--rows", type=int, help="prompts of the greater campaign (default: four a kill)")
    kill.add_argument("--keep", action="store_true", help="leave the folders for a look")
    kill.add_argument("--base", type=Path, help="folder on the disk to use (default: the system's for temporary files)")
    mixed = commands.add_parser(
        "campaign", help="faults of all kinds: on real processes, real freezes, in this process"
    )
    mixed.add_argument("--n", type=int, default=460, help="faults in all (default: %(default)s)")
    mixed.add_argument("--real", type=int, help="of them on real processes (default: an eighth, 60 at least)")
    mixed.add_argument("--seed", type=int, default=7)
    mixed.add_argument(
        "--base", type=Path, help="folder on the disk to use (default: the system's for temporary files)"
    )
    incident = commands.add_parser(
        "incident", help="37,312 rows, 18,421 verified, and a disk that freezes while the worker writes (as root)"
    )
    incident.add_argument("--base", type=Path, help="folder for the disks' images")
    options = parser.parse_args(arguments)
    if options.drill == "incident":
        return run_incident(options)
    if options.drill == "campaign":
        return run_campaign(options)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hsj-drill-model-") as folder:
        model = make_tiny_model("llama", Path(folder), seed=3)
        report = kill_drill(model, options.n, options.seed, options.rows, keep=options.keep, base=options.base)
    for line in report.findings.lines():
        print(line)
    found = summary(report, time.monotonic() - begin)
    print(json.dumps(found))
    return 1 if report.findings.lines() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
