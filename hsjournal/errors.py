"""The errors of hsjournal; each one owns its exit code.

::

    HsjournalError                    1   something went wrong, named in the message
    ├── UsageError                    2   an argument or a setting that can't be used
    │   └── PromptsError              2   the prompts file can't be used as a whole
    ├── GaveUpError                   4   restart intensity exceeded, or unkillable by policy
    ├── NoRoomError                   5   disk or shared memory full, or too small for the forecast
    ├── NoJournalError               10   there is no journal where one is needed
    ├── JournalLockedError           11   another hsjournal holds this run directory
    ├── SchemaError                  12   the journal's schema is newer, damaged or not ours
    ├── ServerError                  13   the server can't be reached, or serves something else
    ├── FencedError                   1   a newer worker owns the run; this one must stop
    └── DumpRejectedError             1   one dump failed a check (a row's matter, never the program's)

Not an error but an exit code too: 0 done, 3 finished with failed samples, 130 and 143 for signals.
"""

from __future__ import annotations

import errno
from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """Exit codes of every hsjournal command."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    FAILED_SAMPLES = 3
    GAVE_UP = 4
    NO_ROOM = 5
    NO_JOURNAL = 10
    LOCKED = 11
    SCHEMA = 12
    SERVER = 13
    INTERRUPTED = 130
    TERMINATED = 143


def end_code(verified: int, failed: int) -> ExitCode:
    """The exit code of a run whose every row has ended; one that verified nothing did not do its job."""
    return ExitCode.FAILED_SAMPLES if failed or not verified else ExitCode.DONE


class Trouble(StrEnum):
    """What ails a storage; told by its error number, never by its words, which hold paths of the user's."""

    FULL = "full"  # no room, or over quota: somebody can make room
    FAILING = "failing"  # I/O errors, read-only, gone: somebody has to mend it
    BUSY = "busy"  # another program has it: it passes

    @classmethod
    def of(cls, code: int | None) -> Trouble:
        """What an ``errno`` of a storage means."""
        return cls.FULL if code in (errno.ENOSPC, errno.EDQUOT) else cls.FAILING


class HsjournalError(Exception):
    """Something went wrong; the message names the thing and the place, the remedy says what to do next."""

    exit_code: ExitCode = ExitCode.ERROR

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}" if self.remedy else self.message


class UsageError(HsjournalError):
    """An argument or a setting that can't be used."""

    exit_code = ExitCode.USAGE


class PromptsError(UsageError):
    """The prompts file can't be used as a whole (a bad line only skips that line)."""


class GaveUpError(HsjournalError):
    """The worker kept dying, or could not be killed and the policy says to stop."""

    exit_code = ExitCode.GAVE_UP


class NoRoomError(HsjournalError):
    """A disk or the hand-over root is full past the pause limit, or too small for the forecast.

    ``trouble`` is what ails the storage.
    """

    exit_code = ExitCode.NO_ROOM

    def __init__(self, message: str, *, remedy: str | None = None, trouble: Trouble = Trouble.FAILING) -> None:
        super().__init__(message, remedy=remedy)
        self.trouble = trouble


class NoJournalError(HsjournalError):
    """There is no journal where one is needed."""

    exit_code = ExitCode.NO_JOURNAL


class JournalLockedError(HsjournalError):
    """Another hsjournal holds this run directory."""

    exit_code = ExitCode.LOCKED


class SchemaError(HsjournalError):
    """The journal's schema is newer than this program, damaged, or not ours."""

    exit_code = ExitCode.SCHEMA


class ServerError(HsjournalError):
    """The server can't be reached, or serves something else than the run was made for."""

    exit_code = ExitCode.SERVER


class FencedError(HsjournalError):
    """A newer worker owns the run: a compare-and-set found another epoch or another state."""


class Reject(StrEnum):
    """Why a dump is not taken. The value is stored in the journal and shown to the user."""

    MALFORMED = "malformed"  # meta.json unreadable, of another schema, or with impossible values
    UNSAFE = "unsafe"  # a link, a special file, or a name that leaves the directory
    WRONG_IDENTITY = "wrong_identity"  # request id or token-id digest of another request
    WRONG_COUNT = "wrong_count"  # more or fewer rows than tokens sent
    WRONG_LAYERS = "wrong_layers"  # other layers, or another number of them, than the manifest's
    WRONG_DTYPE = "wrong_dtype"
    WRONG_HIDDEN = "wrong_hidden"
    WRONG_NORM = "wrong_norm"  # final state pre-norm where post-norm is wanted, or the reverse
    WRONG_SIZE = "wrong_size"  # a file that is not rows x hidden x item size bytes
    NOT_FINITE = "not_finite"  # NaN or infinity in a row
    STALE_BOOT = "stale_boot"  # written by another life of the server than the one asked
    VANISHED = "vanished"  # gone between listing and opening


class DumpRejectedError(HsjournalError):
    """One dump failed a check.

    Args:
        reason: the typed reason, stored in the journal.
        detail: which file, row or value, for people.
    """

    def __init__(self, reason: Reject, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail
