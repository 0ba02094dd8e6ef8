"""A process that encodes rows for :mod:`hsjournal.prompts.pool`: ``python -m hsjournal.prompts.encoder_child FD PARENT``.

Over the socket FD come an :class:`~hsjournal.prompts.spec.IngestSpec` and then lists of rows; back go lists of outcomes, or
(message, remedy, whether the prompts are to blame) when nothing more can be encoded. The end of the socket ends it, and so
does the end of the process PARENT.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from hsjournal.errors import HsjournalError, PromptsError
from hsjournal.lifeline import end_with_parent
from hsjournal.prompts.encode import Encoder, without_torch
from hsjournal.prompts.refusal import shorten


def main(arguments: Sequence[str]) -> int:
    """See the module; the exit code."""
    end_with_parent(-1)
    if os.getppid() != int(arguments[1]):
        return 0  # it ended before it was to end us
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends us
    without_torch()
    with Connection(int(arguments[0])) as parent:
        try:
            encoder = Encoder(parent.recv())
            while True:
                piece = parent.recv()
                parent.send([encoder.outcome(line) for line in piece])
        except (EOFError, ConnectionError):
            return 0  # the parent has all it wants, or is gone
        except HsjournalError as error:
            parent.send((error.message, error.remedy, isinstance(error, PromptsError)))
        except Exception as error:  # noqa: BLE001 - the parent gets it as a typed answer
            parent.send((shorten(f"{type(error).__name__}: {error}"), None, False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
