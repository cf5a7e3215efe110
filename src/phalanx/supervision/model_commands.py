"""Runs `phalanx pull` and `phalanx rm` for a server, as separate processes: streams go on while gigabytes are written.

Of their output it interprets errors only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator
from typing import Literal

from phalanx.config import RUN_PHALANX
from phalanx.environment import child_environment


async def model_command(verb: Literal["pull", "rm"], name: str) -> AsyncGenerator[bytes]:
    """The lines of JSON that the command prints; the last one has `status` "success", or `error`.

    Closing the generator ends the command. A pull that was ended goes on with the next one.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, *RUN_PHALANX, verb, "--json", "--", name,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        env=child_environment(), start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = b""
    try:
        async for line in process.stdout:
            yield line
        await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # pip as well, where one runs
    if process.returncode and b'"error"' not in line:
        yield b'{"error":"phalanx %s ended with status %d"}\n' % (verb.encode(), process.returncode)
