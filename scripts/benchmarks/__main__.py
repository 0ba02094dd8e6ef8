"""``scripts/bench COMMAND``: run one benchmark, or all, and show the bars."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
from pathlib import Path

from bars import ROUNDS, Bar, as_json, say, table

COMMANDS = {
    "handover": "dumps to durable and to verified files, beside dd and the incident's client",
    "journal": "transitions per second, resume, status and claims on a large journal",
    "job": "the whole job on the embedded engine beside a plain packed forward over the same tokens",
    "reconcile": "10,000 orphan directories in the hand-over root",
    "supervisor": "its memory and processor time over a running job, and how soon a complete dump is seen",
}
"""Each is a module beside this one with ``add_options(parser)`` and ``run(options) -> list[Bar]``."""
ALSO = {
    "fleet": "status and merge over 64 shards, and what lost nodes cost, simulated",
    "onlookers": "what 100 status calls and a status --watch cost a run",
    "prompts": "conversations tokenised a second, and the memory that it takes",
    "scaling": "MB/s written and verified by a real worker for 1 to 16 samples in flight, and what bounds it",
}
"""The same, without bars of their own: not part of ``all``."""


def main() -> int:
    """Exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, words in [*COMMANDS.items(), *ALSO.items(), ("all", "all with a goal")]:
        one = commands.add_parser(name, help=words, description=words)
        one.add_argument("--json", type=Path, metavar="FILE", help="write the bars there too")
        one.add_argument("--rounds", type=int, default=ROUNDS, help=f"interleaved rounds [default: {ROUNDS}]")
        one.add_argument("--folder", type=Path, help="on the disk to measure [default: TMPDIR]")
        for member in COMMANDS if name == "all" else [name]:
            importlib.import_module(member).add_options(one)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bars: list[Bar] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was made is removed on the way out
    with tempfile.TemporaryDirectory(prefix="hsj-bench-", dir="/dev/shm") as shm:
        os.environ["HSJOURNAL_SHM"] = shm  # mirrors of what is measured
        for name in COMMANDS if options.command == "all" else [options.command]:
            say(f"-- {name}: {(COMMANDS | ALSO)[name]}")
            bars += importlib.import_module(name).run(options)
    print(table(bars))
    if options.json:
        options.json.write_text(as_json(bars, options.folder or Path(tempfile.gettempdir())) + "\n")
    return 0 if all(bar.met is not False for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
