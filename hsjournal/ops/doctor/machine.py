"""The machine and the environment: versions, GPUs, limits of the process, and what a log-out would take away."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from hsjournal import __version__
from hsjournal.ops.doctor.lines import Line, ok, warn

LIBRARIES = (
    "torch",
    "transformers",
    "sglang",
    "sqlmodel",
    "sqlalchemy",
    "aiohttp",
    "psutil",
    "rich",
    "typer",
    "xxhash",
)
LEAST_FILES = 4096
"""Descriptors: each sample in flight holds its dump's files, its output and a connection."""
LEAST_PINNED = 1 << 30
"""Bytes that the SGLang plugin may have to pin on this machine (its fixed pieces)."""
_GPU_DEADLINE = 5.0
_FIRST_USER = 1000
"""Below it are system users, whom logind leaves alone."""


def examine() -> Iterator[Line]:
    """Everything that can be told without touching a disk or a server."""
    yield ok("python", f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.release()}")
    found = {name: _version(name) for name in LIBRARIES}
    yield ok("versions", f"hsjournal {__version__}, " + ", ".join(f"{n} {v}" for n, v in found.items() if v))
    if found["torch"] is None:
        yield warn(
            "torch", "not installed: no embedded engine, no hsjournal.data here",
            "Attach to an SGLang server with --server, or install hsjournal[embedded].",
        )  # fmt: skip
    yield gpus()
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield pinned_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    if Path("/run/systemd/system").exists():
        yield shared_memory_after_logout(os.getuid(), Path("/etc/systemd"), Path("/var/lib/systemd/linger"))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpus(program: str = "nvidia-smi") -> Line:
    """GPUs as ``nvidia-smi`` tells them; none is well, since the embedded engine runs without."""
    if shutil.which(program) is None:
        return ok("gpu", "none seen (no nvidia-smi): the embedded engine computes on the CPU")
    query = [program, "--query-gpu=name,memory.total,memory.used,utilization.gpu", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        return warn(
            "gpu", f"{program} did not answer in {_GPU_DEADLINE:.0f} s", "Look at the driver (dmesg, Xid errors)."
        )
    if done.returncode:
        words = (done.stdout + done.stderr).strip().splitlines() or ["it said nothing"]
        return warn("gpu", f"{program} failed: {words[-1]}", "Look at the driver, or go on without a GPU.")
    return ok("gpu", "; ".join(line.strip() for line in done.stdout.strip().splitlines()) or "none")


def open_files(soft: int, hard: int) -> Line:
    """The limit of open files."""
    words = f"{'unlimited' if soft == resource.RLIM_INFINITY else f'{soft:,}'} open files allowed"
    if soft == resource.RLIM_INFINITY or soft >= LEAST_FILES:
        return ok("open files", words)
    how = (
        f"ulimit -n {LEAST_FILES}"
        if hard == resource.RLIM_INFINITY or hard >= LEAST_FILES
        else "raise nofile in limits.conf"
    )
    return warn("open files", f"{words}; many samples in flight need about {LEAST_FILES:,}", f"Before the run: {how}.")


def pinned_memory(soft: int) -> Line:
    """The limit of locked memory, which CUDA's pinned buffers may fall under."""
    if soft == resource.RLIM_INFINITY or soft >= LEAST_PINNED or os.getuid() == 0:
        return ok("memlock", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 20:,} MiB")
    return warn(
        "memlock", f"{soft >> 10:,} KiB may be locked; an SGLang server started from this shell may be refused its pinned buffers",
        "Start the server with `ulimit -l unlimited` (container: --ulimit memlock=-1).",
    )  # fmt: skip


def shared_memory_after_logout(uid: int, settings: Path, linger: Path) -> Line:
    """Whether logind would delete this user's files in /dev/shm at the last log-out (``RemoveIPC``, on by default)."""
    if uid < _FIRST_USER:
        return ok("logind", "leaves the shared memory of root and system users alone")
    try:
        import pwd

        if (linger / pwd.getpwuid(uid).pw_name).exists():
            return ok("logind", "this user lingers: shared memory stays after log-out")
    except KeyError:
        pass
    removes = True
    for file in (settings / "logind.conf", *sorted((settings / "logind.conf.d").glob("*.conf"))):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition("=")
            if key.strip() == "RemoveIPC":
                removes = value.strip().lower() in ("yes", "true", "1", "on")
    if not removes:
        return ok("logind", "RemoveIPC=no: shared memory stays after log-out")
    return warn(
        "logind", "RemoveIPC: at your last log-out the dumps in /dev/shm are deleted under the run",
        "Run `loginctl enable-linger`, or set RemoveIPC=no in logind.conf.",
    )  # fmt: skip
