"""Turn `hsjournal status --json` into the demo's last line, and fail when a row is neither verified nor skipped.

Usage: hsjournal status RUN_DIR --json | demo_summary.py RUN_DIR OUT_DIR SECONDS
"""

from __future__ import annotations

import json
import sys


def main(run_dir: str, out_dir: str, seconds: str) -> int:
    """Print one JSON object; the exit code says whether every row came to its end."""
    counts = json.load(sys.stdin)["counts"]
    rows = {state: count["rows"] for state, count in counts.items()}
    summary = {
        "rows": sum(rows.values()),
        "verified": rows.get("verified", 0),
        "skipped": rows.get("skipped", 0),
        "failed": rows.get("failed", 0),
        "tokens": counts.get("verified", {}).get("tokens", 0),
        "seconds": float(seconds),
        "out_dir": out_dir,
        "run_dir": run_dir,
    }
    print(json.dumps(summary))
    return 0 if summary["rows"] and summary["rows"] == summary["verified"] + summary["skipped"] else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
