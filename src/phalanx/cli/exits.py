"""What a command ends with: its exit code, after its error was reported."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from phalanx.cli import streams
from phalanx.cli.terminal import report
from phalanx.errors import ExitCode, PhalanxError, exit_code_of

INTERRUPTED = 130  # as shells report SIGINT


def exit_code(command: Callable[[], int]) -> int:
    """Run a command and report its error.

    An error of stdout ends the command as an error of its own.

    Raises:
        PhalanxError: everything is logged, so the command's error is shown with its traceback.
    """
    try:
        return command()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error is not streams.failure():
            raise
        return ExitCode.CRASH  # `flushed` reports it
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
