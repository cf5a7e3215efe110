"""Raises the number of files that this process may have open: 256 on macOS, often 1,024 on Linux.

A server has one for every connection, a rank three for every file of weights.
"""

from __future__ import annotations

import contextlib
import resource

ENOUGH = 8192
"""For a rank or an agent: the largest models have some hundred files of weights."""


def raise_limit(wanted: int = ENOUGH) -> None:
    """Raise the soft limit to `wanted`, or as far as the system lets this process; never lower it.

    macOS names no hard limit and refuses what exceeds `kern.maxfilesperproc`, so smaller values are tried as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    while possible > soft:
        with contextlib.suppress(OSError, ValueError):  # ValueError is how `resource` says EINVAL
            resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
            return
        possible //= 2
