"""One client of the hand-over in a process of its own, told by lines of JSON what to do; answers each with one.

``ours ROOT OUT TOKENS``: dumps to files as the worker does it, without its journal; ``incident TENSORS OUT``: torch.load of
each file, torch.save of all, fsync, as the client of the incident did it; ``bare TENSORS OUT``: only the bytes' way.
What was written is removed after the clock has stopped.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Step = Callable[[int, dict[str, Any]], Path]
"""Writes one sample and says where it lies."""
Ways = dict[str, Callable[..., Step]]


def main() -> None:
    """Serve until the input ends."""
    ways: Ways = {"incident": incident, "bare": bare, "ours": ours}
    step = ways[sys.argv[1]](*sys.argv[2:])
    print(json.dumps({"rss_mb": _rss()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        began = resource.getrusage(resource.RUSAGE_SELF)
        clock, own, written = time.monotonic(), 0.0, []
        with ThreadPoolExecutor(order.get("at_once", 1)) as pool:
            for done in [pool.submit(_on_this_thread, step, row, order) for row in order["rows"]]:
                path, busy = done.result()
                written.append(path)
                own += busy
        seconds = time.monotonic() - clock
        ended = resource.getrusage(resource.RUSAGE_SELF)
        cpu = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
        answer = {"seconds": seconds, "cpu_s": cpu, "own_s": own, "peak_mb": ended.ru_maxrss / 1024} | _held()
        for path in written:
            path.unlink()
        print(json.dumps(answer), flush=True)


def _on_this_thread(step: Step, row: int, order: dict[str, Any]) -> tuple[Path, float]:
    """Where the sample lies, and the processor time of the thread that filled and checked it."""
    begin = time.thread_time()
    path = step(row, order)
    return path, time.thread_time() - begin


def bare(tensors: str, out: str) -> Step:
    """Only the bytes' way: read from tmpfs into one buffer, written past the page cache."""
    files = sorted(Path(tensors).glob("*.bin"))
    block = mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)

    def step(row: int, _order: dict[str, Any]) -> Path:
        path = Path(out) / f"bare_{row}.bin"
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        at = 0
        for file in files:
            with file.open("rb", buffering=0) as source:
                while got := os.readv(source.fileno(), [block]):
                    with memoryview(block) as memory, memory[: -(-got // 4096) * 4096] as view:
                        at += os.pwrite(target, view, at)
        os.fdatasync(target)
        os.close(target)
        return path

    return step


def incident(tensors_: str, out_: str) -> Step:
    """The incident's client; one sample at a time."""
    import torch

    tensors, out = Path(tensors_), Path(out_)

    torch.set_num_threads(1)
    names = sorted(path.name for path in tensors.glob("*.pt"))

    def step(row: int, _order: dict[str, Any]) -> Path:
        loaded = {name: torch.load(tensors / name, weights_only=True) for name in names}
        aux = [value for name, value in loaded.items() if name != "final.pt"]
        body = {"aux_hidden_state": torch.cat(aux, dim=-1)[None], "hidden_state": loaded["final.pt"][None]}
        path = out / f"incident_{row}.ckpt"
        with path.open("wb") as file:
            torch.save(body, file)
            file.flush()
            os.fsync(file.fileno())
        return path

    return step


def ours(root: str, out: str, tokens: str) -> Step:
    """Ours: open the dump, write the file, and if told read it back."""
    from handover_scene import DTYPE, HIDDEN, LAYERS, Scene

    from hsjournal.dump.expect import Expectation
    from hsjournal.dump.protocol import RequestId, token_ids_sha256
    from hsjournal.dump.reader import open_dump, open_root
    from hsjournal.sink.formats import layout_named
    from hsjournal.sink.stream import Sink
    from hsjournal.sink.verify import verify_file

    scene = Scene.at(Path(root), int(tokens))
    folder, layout = Path(out), layout_named("specforge")
    sink = Sink(folder, layout, folder.with_name("rejects"))
    root_fd, digest = open_root(scene.root), token_ids_sha256(scene.ids)

    def step(row: int, order: dict[str, Any]) -> Path:
        rid = RequestId.parse(order["rid"].replace("ROW", str(row)))
        assert rid is not None
        sample = scene.sample(row, rid)
        expect = Expectation(rid, scene.tokens, HIDDEN, DTYPE, LAYERS, "post", digest)
        with open_dump(root_fd, rid, expect) as dump:
            written = sink.write(dump, sample, _nothing)
        if order.get("verify"):
            verify_file(folder, layout, sample, written, _nothing)
        return folder / written.path

    if os.environ.get("HSJ_BENCH_HELD"):
        _watch_calls()
    return step


def _nothing(_phase: str, _nbytes: int) -> None:
    pass


def _rss() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1048576


# How long the interpreter's lock is held: processor time outside the calls that give it up, on the threads that fill and
# check. The writers' threads hold it for a blink per block.

_calls = SimpleNamespace(on=False, inside=0.0, number=0, cost=0.0, began=0.0)


def _watch_calls() -> None:
    """Time every call that gives up the lock; one sample at a time, on one thread."""
    import xxhash

    from hsjournal.sink import blocks, gather, verify

    class Digest:
        def __init__(self) -> None:
            self._digest = xxhash.xxh3_128()
            self.update = _timed(self._digest.update)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    for module in (blocks, gather, verify):
        vars(module)["xxhash"] = SimpleNamespace(xxh3_128=Digest)
    names = vars(gather)
    names |= {name: _timed(names[name]) for name in ("is_finite", "crc32")}
    names["os"] = SimpleNamespace(preadv=_timed(os.preadv), fstat=os.fstat)
    empty = _timed(lambda: None)
    begin = time.thread_time()
    for _ in range(20_000):
        empty()
    _calls.cost = (time.thread_time() - begin - _calls.inside) / 20_000
    _calls.on, _calls.inside, _calls.number = True, 0.0, 0


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        begin = time.thread_time()
        try:
            return function(*arguments)
        finally:
            _calls.inside += time.thread_time() - begin
            _calls.number += 1

    return timed


def _held() -> dict[str, float]:
    if not _calls.on:
        return {}
    told = {"inside_s": _calls.inside, "calls": _calls.number, "cost_s": _calls.cost * _calls.number}
    _calls.inside, _calls.number = 0.0, 0
    return told


if __name__ == "__main__":
    main()
