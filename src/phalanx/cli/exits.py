"""What a command ends with: its exit code, after its error was reported. Does not know the commands."""

from __future__ import annotations

import logging
from collections.abc import Callable

from phalanx.cli.terminal import report
from phalanx.errors import PhalanxError, exit_code_of

INTERRUPTED = 130  # as shells report SIGINT


def exit_code(command: Callable[[], int]) -> int:
    """Run a command and report its error.

    Raises:
        PhalanxError: everything is logged, so the command's error is shown with its traceback.
    """
    try:
        return command()
    except KeyboardInterrupt:
        return INTERRUPTED
    except PhalanxError as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        report(error)
        return exit_code_of(error)
