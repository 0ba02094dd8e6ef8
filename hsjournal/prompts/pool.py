"""Rows encoded in several processes, in order, and never more than a few megabytes of them under way.

A child is started by exec and talks over a socket pair: it gets a piece of rows, answers with what became of them, and ends
when the socket is closed, also by our death. One thread for each child waits for its answers, so neither side can block
the other by writing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import Any

from hsjournal.errors import HsjournalError, PromptsError
from hsjournal.prompts.encode import Encoder, Outcome
from hsjournal.prompts.readers import Line
from hsjournal.prompts.spec import IngestSpec

PIECE_ROWS = 64
PIECE_BYTES = 512 << 10
WORTH_BYTES = 4 << 20
"""Below this, the start of a process takes longer than the work."""
MOST = 32
"""Processes that one reader and one journal can keep busy."""


def processes_for(spec: IngestSpec, nbytes: int) -> int:
    """How many processes encode: 1 means this one alone."""
    if spec.processes:
        return spec.processes
    return min(MOST, len(os.sched_getaffinity(0))) if nbytes >= WORTH_BYTES else 1


def outcomes(lines: Iterable[Line], encoder: Encoder, spec: IngestSpec, processes: int) -> Generator[Outcome]:
    """What becomes of each row, in the rows' order.

    Raises:
        PromptsError: when the tokenizer can't be used.
        HsjournalError: when a process was ended.
    """
    if processes == 1:
        yield from map(encoder.outcome, lines)
        return
    with _children(spec, processes) as (idle, threads):
        waiting: deque[Future[list[Outcome]]] = deque()
        for piece in _pieces(lines):
            waiting.append(threads.submit(_ask, idle, piece))
            if len(waiting) >= 3 * processes:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _pieces(lines: Iterable[Line]) -> Iterator[list[Line]]:
    piece: list[Line] = []
    nbytes = 0
    for line in lines:
        piece.append(line)
        nbytes += line.nbytes
        if len(piece) >= PIECE_ROWS or nbytes >= PIECE_BYTES:
            yield piece
            piece, nbytes = [], 0
    if piece:
        yield piece


@contextmanager
def _children(spec: IngestSpec, processes: int) -> Iterator[tuple[SimpleQueue[Connection], ThreadPoolExecutor]]:
    idle: SimpleQueue[Connection] = SimpleQueue()
    children: list[subprocess.Popen[bytes]] = []
    ends: list[Connection] = []
    threads = ThreadPoolExecutor(processes, "encoding")
    try:
        for _ in range(processes):
            ours, theirs = Pipe()
            ends.append(ours)
            with theirs:
                number = str(theirs.fileno())
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "hsjournal.prompts.encoder_child", number, str(os.getpid())],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,  # ours is a stream of JSON lines
                        pass_fds=[theirs.fileno()],
                    )
                )
            ours.send(spec)
            idle.put(ours)
        yield idle, threads
    finally:
        for child in children:
            child.kill()  # nothing of theirs is kept, and a thread may be waiting for an answer
        for child in children:
            child.wait()
        threads.shutdown(cancel_futures=True)
        for end in ends:
            end.close()


def _ask(idle: SimpleQueue[Connection], piece: list[Line]) -> list[Outcome]:
    child = idle.get()
    try:
        child.send(piece)
        answer: Any = child.recv()
    except (EOFError, OSError) as error:
        raise HsjournalError(
            f"a process that tokenised lines {piece[0].number:,} to {piece[-1].number:,} was ended",
            remedy="See whether memory ran out; --tokenize-processes 1 does without such processes.",
        ) from error
    finally:
        idle.put(child)
    if isinstance(answer, list):
        return answer
    message, remedy, of_prompts = answer
    raise (PromptsError if of_prompts else HsjournalError)(message, remedy=remedy)
