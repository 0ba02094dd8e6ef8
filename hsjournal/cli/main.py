"""The console script."""

from __future__ import annotations

import errno
import os
import signal
import sys

from hsjournal.errors import ExitCode, HsjournalError


def main() -> None:
    """Run one command; every error of ours is one sentence on standard error, and its exit code."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(int(ExitCode.INTERRUPTED)))
    try:
        _run()
    except HsjournalError as error:
        print(f"hsjournal: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    except BrokenPipeError:
        sys.exit(int(ExitCode.ERROR))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"hsjournal: {error.strerror or error}{where}. {_remedy(error)}", file=sys.stderr)
        sys.exit(int(ExitCode.ERROR))


def _remedy(error: OSError) -> str:
    """What helps against an error of the system that no command has words of its own for."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "Make room there, then give the same command again."
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "Let yourself read and write there, or name another place."
        case errno.ENOENT | errno.ENOTDIR | errno.EISDIR | errno.EEXIST | errno.ENAMETOOLONG:
            return "Check that path."
        case errno.EADDRINUSE | errno.EADDRNOTAVAIL:
            return "Name another port or address."
        case errno.EMFILE | errno.ENFILE | errno.ENOMEM | errno.EAGAIN:
            return "The machine or your limits are at their end: `hsjournal doctor` looks at them."
        case _:
            return "See that this disk or device works (`dmesg`), then give the same command again; nothing is lost."


def _run() -> None:
    from hsjournal.cli.quick import quick_status

    if not quick_status(sys.argv[1:]):
        import typer

        from hsjournal.cli.app import app
        from hsjournal.cli.panels import arrange
        from hsjournal.cli.settings import bind, unknown_variables

        command = typer.main.get_command(app)
        arrange(command)
        defaults, _ = bind(command)
        for line in unknown_variables(command, os.environ):
            print(f"hsjournal: {line}", file=sys.stderr)
        command(default_map=defaults)


if __name__ == "__main__":
    main()
