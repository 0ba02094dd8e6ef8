"""Looks at things that may be stuck, one child for each: run by path, with a deadline, standard library only.

``python -I -S glance.py '[[FD, "TASK", "ARGUMENT", …], …]'`` forks a child for each look and ends. A child writes its
pid and then one JSON object to its descriptor. It reads and never writes anything else. Each looks at one place only,
so that a disk that hangs hides nothing but itself.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlite3
    from http.client import HTTPConnection

MOST_NAMES = 4000
MOST_FILES = 80
MOST_TEXT = 1 << 18
_TAIL = 8192
_STEPS = 20_000
"""Steps of SQLite between two looks at the clock."""


def text(path: str) -> dict[str, Any]:
    """The content of a small file, and how old it is."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        return {"text": file.read(MOST_TEXT).decode(errors="replace"), "mtime": found.st_mtime}


def tail(path: str) -> dict[str, Any]:
    """A log: size, inode, time of the last change, last line; and the room of its disk."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        file.seek(max(0, found.st_size - _TAIL))
        lines = [line for line in file.read(_TAIL).decode(errors="replace").split("\n") if line.strip()]
    return {
        "size": found.st_size,
        "inode": found.st_ino,
        "mtime": found.st_mtime,
        "last_line": lines[-1][-500:] if lines else "",
    }


def place(path: str) -> dict[str, Any]:
    """Room and kind of the file system under a path, or under the nearest parent that is there."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    room = os.statvfs(path)
    return {
        "path": path,
        "free": room.f_bavail * room.f_frsize,
        "total": room.f_blocks * room.f_frsize,
        "inodes_free": room.f_favail,
        "read_only": bool(room.f_flag & os.ST_RDONLY),
        "device": _device(path),
    }


def _device(path: str) -> str:
    number = os.stat(path).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def root(path: str) -> dict[str, Any]:
    """Everything in a hand-over root: each name with its age and what lies directly in it. No link is followed."""
    entries = []
    names = sorted(os.listdir(path))
    for name in names[:MOST_NAMES]:
        try:
            entries.append(_entry(os.path.join(path, name), name))
        except FileNotFoundError:
            continue  # gone since it was listed
        except OSError as error:
            entries.append({"name": name, "kind": "unreadable", "problem": error.strerror or str(error)})
    return {"entries": entries, "names": len(names), "mtime": os.stat(path).st_mtime, "room": place(path)}


def _entry(path: str, name: str) -> dict[str, Any]:
    found = os.lstat(path)
    entry: dict[str, Any] = {"name": name, "mtime": found.st_mtime, "kind": "other", "bytes": found.st_size}
    if not stat.S_ISDIR(found.st_mode):
        return entry
    files: dict[str, int] = {}
    with os.scandir(path) as inside:
        for file in inside:
            if len(files) < MOST_FILES and file.is_file(follow_symlinks=False):
                files[file.name] = file.stat(follow_symlinks=False).st_size
    return entry | {"kind": "directory", "files": files, "bytes": sum(files.values()), "tokens": _tokens(path, files)}


def _tokens(path: str, files: dict[str, int]) -> int | None:
    """``num_tokens`` of a meta.json, whoever wrote it."""
    if not 0 < files.get("meta.json", 0) <= 1 << 16:
        return None
    try:
        with open(os.open(os.path.join(path, "meta.json"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            value = json.loads(file.read(1 << 16))["num_tokens"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if type(value) is int else None


def journal(path: str, *rows: str) -> dict[str, Any]:
    """Rows on their way, those of ``rows``, the next one to be sent, and when the last change was; changes nothing."""
    import sqlite3  # each child imports what it needs: this program starts in a few hundredths of a second

    how = "mode=ro" if os.path.exists(f"{path}-wal") else "mode=ro&immutable=1"  # as peek.py
    name = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    connection = sqlite3.connect(f"file:{name}?{how}", uri=True, timeout=0.5, isolation_level=None)
    try:
        connection.execute("PRAGMA query_only=ON")
        columns = "row, sample_id, num_tokens, state, attempt, strikes, sent_at, changed_at, reason"
        sample = f"SELECT {columns} FROM sample"
        found: list[tuple[Any, ...]] = []
        for state in ("sent", "dumped", "written"):  # those whose read-back is put off wait for nothing
            here = f"state = '{state}' AND coalesce(verify_method, '') <> 'deferred'"
            found += connection.execute(f"{sample} WHERE {here} ORDER BY row LIMIT 200").fetchall()
        for row in rows:
            found += connection.execute(f"{sample} WHERE row = ?", (int(row),)).fetchall()
        next_one = connection.execute(f"{sample} WHERE state = 'pending' ORDER BY row LIMIT 1").fetchone()
        run = connection.execute("SELECT run_id, epoch, finished_at FROM run WHERE id = 1").fetchone()
        counts = connection.execute("SELECT state, rows FROM state_count").fetchall()
        put_off = "SELECT count(*) FROM sample WHERE state = 'written' AND verify_method = 'deferred'"
        ((deferred,),) = connection.execute(put_off).fetchall()
        recent = "SELECT id, kind, detail FROM event ORDER BY id DESC LIMIT 5000"  # as peek.py
        kinds = "kind IN ('supervisor_started', 'supervisor_ended')"
        last = connection.execute(
            f"SELECT kind, detail FROM ({recent}) WHERE {kinds} ORDER BY id DESC LIMIT 1"
        ).fetchone()
        named = columns.split(", ")
        return {
            "rows": {str(r[0]): dict(zip(named, r, strict=True)) for r in found},
            "next": dict(zip(named, next_one, strict=True)) if next_one else None,
            "run_id": run[0] if run else None,
            "epoch": run[1] if run else None,
            "finished_at": run[2] if run else None,
            "counts": dict(counts),
            "deferred": deferred,
            "last_change": _last_change(connection),
            "supervisor": {"kind": last[0], "detail": json.loads(last[1])} if last else None,
        }
    finally:
        connection.close()


def _last_change(connection: sqlite3.Connection) -> float | None:
    """When a row last changed its state: over all rows, which are too many to be read where time is short."""
    import sqlite3

    until = time.monotonic() + 0.3
    connection.set_progress_handler(lambda: int(time.monotonic() > until), _STEPS)
    try:
        value = connection.execute("SELECT max(changed_at) FROM sample WHERE state <> 'pending'").fetchone()[0]
    except sqlite3.OperationalError:
        return None
    return float(value) if value is not None else None


def server(address: str, seconds: str) -> dict[str, Any]:
    """Whether a server answers, with something that costs it no forward pass: its settings."""
    import http.client

    scheme, _, rest = address.partition("://")
    host, _, prefix = rest.partition("/")
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    connection = kind(host, timeout=float(seconds))
    begin = time.monotonic()
    prefix = f"/{prefix.strip('/')}" if prefix.strip("/") else ""
    try:
        status, body = _get(connection, f"{prefix}/server_info")
        if status == 404:
            status, body = _get(connection, f"{prefix}/get_server_info")
    except TimeoutError:
        return {"answers": False, "problem": f"no answer within {seconds} s", "kind": "silent"}
    except ConnectionRefusedError:
        return {"answers": False, "problem": "connection refused: nobody listens there", "kind": "refused"}
    except (OSError, http.client.HTTPException) as error:
        return {"answers": False, "problem": str(error) or type(error).__name__, "kind": "broken"}
    finally:
        connection.close()
    answer: dict[str, Any] = {"answers": status < 500, "status": status}
    answer["ms"] = round(1000 * (time.monotonic() - begin), 1)
    if status >= 500:
        answer |= {"problem": f"it answers {status}", "kind": "error"}
    try:
        info = json.loads(body)
        ours = info.get("hsjournal") or {}
        answer |= {"model": info.get("model_path"), "version": info.get("version")}
        answer |= {"boot_id": ours.get("boot_id"), "in_flight": len(ours["in_flight"]) if "in_flight" in ours else None}
    except (ValueError, AttributeError, TypeError):
        pass
    return answer


def _get(connection: HTTPConnection, path: str) -> tuple[int, bytes]:
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read(1 << 22)


def gpu(seconds: str) -> dict[str, Any]:
    """Use and memory of each GPU, by nvidia-smi where it is."""
    import subprocess

    fields = ("index", "name", "utilization.gpu", "memory.used", "memory.total")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=float(seconds), check=True)
    except FileNotFoundError:
        return {"gpus": [], "problem": "no nvidia-smi on this machine"}
    except (subprocess.SubprocessError, OSError) as error:
        return {"gpus": [], "problem": f"nvidia-smi does not answer: {error}"}
    names = ("index", "name", "use_percent", "memory_used_mib", "memory_total_mib")
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.decode(errors="replace").splitlines()]
    return {"gpus": [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    f.__name__: f for f in (text, tail, place, root, journal, server, gpu)
}


def answer(task: str, *arguments: str) -> dict[str, Any]:
    """Do one task; an error is part of the answer."""
    try:
        return TASKS[task](*arguments)
    except FileNotFoundError as error:
        return {"error": f"{error.filename} is not there", "missing": True}
    except Exception as error:  # noqa: BLE001 - a child's last word, whatever it is, is shown to the user
        return {"error": str(getattr(error, "strerror", None) or error) or type(error).__name__}


def main(questions: list[list[Any]]) -> None:
    """Fork a child for each question."""
    for fd, *words in questions:
        if os.fork():
            os.close(fd)
            continue
        for other in questions:
            if other[0] > fd:
                os.close(other[0])
        with open(fd, "w", encoding="utf-8") as out:
            out.write(f"{os.getpid()}\n")
            out.flush()
            out.write(json.dumps(answer(*words)))
        return


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
