"""Reports a command's error and gives its exit code."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Mapping

from phalanx.cli import streams
from phalanx.cli.terminal import report
from phalanx.errors import ExitCode, PhalanxError, exit_code_of

INTERRUPTED = 130  # as shells report SIGINT
_PERMISSION = "Give this user access to it and to the directories above it, or name another one."
FILE_REMEDIES: Mapping[int | None, str] = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "Name another one: this file system takes no changes.",
    errno.ENOSPC: "Make room on that disk.",
    errno.EDQUOT: "Make room within this user's quota.",
}


def exit_code(command: Callable[[], int]) -> int:
    """Run a command and report its error.

    An error of stdout ends the command as an error of its own. A file or directory that the system refuses is the
    user's to mend, wherever it is met.

    Raises:
        PhalanxError, OSError: everything is logged, so the command's error is shown with its traceback.
        OSError: it names no file.
    """
    try:
        return command()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error is streams.failure():
            return ExitCode.CRASH  # `flushed` reports it
        if not isinstance(error.filename, str | bytes) or logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        report(
            PhalanxError(f"{os.fsdecode(error.filename)}: {error.strerror}.", remedy=FILE_REMEDIES.get(error.errno, ""))
        )
        return ExitCode.CRASH
    except PhalanxError as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        report(error)
        return exit_code_of(error)


def for_launchd(code: int, label: str) -> int:
    """The exit code that launchd is to see, which knows only 0 and others, and starts again after those.

    A code after which a restart cannot help becomes 0, so that a wrong flag is not tried every ten seconds.

    Args:
        label: of the unit, for the command that starts it again.
    """
    if code not in [final for final in ExitCode if final != ExitCode.OK and not final.restart_helps]:
        return code
    print(
        f"launchd does not start this again: a restart cannot help (status {code}). When it is mended: "
        f"sudo launchctl kickstart -k system/{label}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return ExitCode.OK


def flushed(code: int) -> int:
    """Write what stdout still holds. Returns the exit code, which is that of a failure if stdout failed."""
    failure = streams.failure()
    if failure is None:
        return code
    if not isinstance(failure, BrokenPipeError):  # the reader of a pipe may have seen enough
        print(f"error: stdout cannot be written: {failure.strerror}.", file=sys.stderr)
    return ExitCode.CRASH
