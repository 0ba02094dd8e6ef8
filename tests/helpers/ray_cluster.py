"""A Ray cluster on this machine, as a process of its own: each node has a private folder and dies when told to.

Run by path; reads commands as JSON lines and answers each with one: ``{"add": NAME}``, ``{"remove": NAME}``. It ends with
its standard input, and takes all that it started along.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.removing import delete

TOKEN = "0123456789abcdef" * 4


class RayCluster:
    """The other side of it.

    Args:
        process: the helper.
        folder: of the nodes' folders.
        temporary: Ray's own.
        environment: of whoever may talk to it.
        address: of the head.
    """

    def __init__(
        self, process: subprocess.Popen[str], folder: Path, temporary: Path, environment: dict[str, str]
    ) -> None:
        self._process, self.folder, self.temporary = process, folder, temporary
        self.address = self._answer()["address"]
        self.environment = environment

    def add(self, name: str, **environment: str) -> Path:
        """A node with one of the resource ``hsjournal``; its private folder."""
        folder = self.folder / name
        (folder / "shm").mkdir(parents=True)
        own = {"HSJOURNAL_NODE_DIR": str(folder), "HSJOURNAL_SHM": str(folder / "shm")}
        self._ask({"add": name, "environment": environment | own})
        return folder

    def remove(self, name: str) -> None:
        """Kill all processes of a node, and what it started, and delete its folder."""
        self._ask({"remove": name})
        delete(self.folder / name)

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError("the cluster died; see its log")


@contextmanager
def ray_cluster(folder: Path, *, is_open: bool = False) -> Iterator[RayCluster]:
    """A head without the resource, on loopback; without a token for whoever comes, if it is open. Nothing of it is left at the end."""
    temporary = Path(tempfile.mkdtemp(prefix="hsjr"))  # short: sockets lie below it
    before = set(os.listdir("/dev/shm"))
    environment = _environment(temporary) | ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": ""} if is_open else {})
    with (folder / "ray.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, str(temporary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            text=True, env=environment,
        )  # fmt: skip
    try:
        yield RayCluster(process, folder, temporary, environment)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
        left = {p.pid: p.info["cmdline"] for p in _of(temporary)}
        for pid in left:
            psutil.Process(pid).kill()
        shutil.rmtree(temporary, ignore_errors=True)
        assert not left, f"Ray left processes: {left}"
        assert not {name for name in set(os.listdir("/dev/shm")) - before if "plasma" in name}


def _of(temporary: Path) -> list[psutil.Process]:
    """Processes of this cluster, waited for a little."""
    for _ in range(50):
        found = [p for p in psutil.process_iter(["cmdline"]) if str(temporary) in " ".join(p.info["cmdline"] or ())]
        if not found:
            return []
        time.sleep(0.2)
    return found


def _environment(temporary: Path) -> dict[str, str]:
    return os.environ | {
        "RAY_TMPDIR": str(temporary), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_gcs_server_request_timeout_seconds": "30",
    }  # fmt: skip


def main(temporary: str) -> None:
    """The helper's own life."""
    from ray.cluster_utils import Cluster

    common = {
        "temp_dir": f"{temporary}/ray", "plasma_directory": temporary, "include_dashboard": False,
        "object_store_memory": 80 << 20,
    }  # fmt: skip
    if os.environ["RAY_AUTH_MODE"] == "disabled":
        common["node_ip_address"] = "127.0.0.1"  # else it would talk to the whole network
    cluster = Cluster(initialize_head=True, head_node_args=common | {"num_cpus": 0})
    nodes: dict[str, Any] = {}
    print(json.dumps({"address": cluster.address}), flush=True)
    try:
        for line in sys.stdin:
            command = json.loads(line)
            if "add" in command:
                nodes[command["add"]] = cluster.add_node(
                    **common, num_cpus=1, resources={"hsjournal": 1}, env_vars=command["environment"]
                )
            else:
                cluster.remove_node(nodes.pop(command["remove"]), allow_graceful=False)
            print("{}", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
