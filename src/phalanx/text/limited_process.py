"""Processes that do a client's or a model's work with limited time and memory, one job after another.

Some work cannot be interrupted inside this process: a chat template that loops, a grammar that takes minutes to
compile. The operating system limits a process: its processor time by a timer, its memory by `RLIMIT_AS`; on macOS,
which does not enforce that, this process watches its size.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache

import psutil

WATCH_S = 0.1  # between two checks of the size of a working process
LARGE = 1 << 20  # bytes of a job after which its process ends: memory that its heap keeps could be missing for the next
OUT_OF_MEMORY = 100  # exit status of a process that got no more memory


class ProcessLimit(Exception):
    """A job took too much time or memory, or ended its process; says what."""


class LimitedProcesses:
    """One process per thread that works at the time. Threads may call all methods concurrently.

    Args:
        module: the program. It reads jobs, a line each, and answers each with a line; see `answer_jobs`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._idle: deque[_Process] = deque()

    def start(self) -> None:
        """Start a process ahead of its first use. Returns at once."""
        self._idle.append(_Process(self._module))

    def ask(self, job: bytes, *, seconds: float, memory: int) -> bytes:
        """The answer to a job.

        Args:
            job: a line, without its end.
            seconds: limit of the program's processor time, for the error.
            memory: bytes that it may take.

        Raises:
            ProcessLimit: the process was ended, by its own timer or because it grew too large.
        """
        process = self._take()
        answer = None
        try:
            answer = process.ask(job, seconds, memory)
        finally:
            if answer is not None and len(job) < LARGE:
                self._idle.append(process)
            else:
                process.close()
        return answer

    def _take(self) -> _Process:
        """An idle process that still runs, or a new one."""
        with contextlib.suppress(IndexError):
            while not (process := self._idle.pop()).runs:
                process.close()
            return process
        return _Process(self._module)


class _Process:
    """A process that does one job after another."""

    def __init__(self, module: str) -> None:
        # No variable of this process's environment: some are secrets. Ctrl-C is for the server alone.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            process_group=0,
        )
        self.close = weakref.finalize(self, _end, self._child)

    @property
    def runs(self) -> bool:
        return self._child.poll() is None

    def ask(self, job: bytes, seconds: float, memory: int) -> bytes:
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(job + b"\n")
            self._child.stdin.flush()
        self._watch(memory)
        line = self._child.stdout.readline()
        if line.endswith(b"\n"):
            return line
        if self._child.wait() == -signal.SIGPROF:
            raise ProcessLimit(f"it took more than {seconds:g} s of processor time")
        if self._child.returncode == OUT_OF_MEMORY:
            raise ProcessLimit(_too_large(memory))
        raise ProcessLimit(f"its process ended with status {self._child.returncode}")

    def _watch(self, memory: int) -> None:
        """Wait for the first byte of the answer, or for the end.

        Raises:
            ProcessLimit: the process has grown beyond `memory` bytes.
        """
        answered = select.poll()
        answered.register(self._child.stdout or -1, select.POLLIN)
        while not answered.poll(WATCH_S * 1000):
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(self._child.pid).memory_info().rss > memory:
                    raise ProcessLimit(_too_large(memory))


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # a job that was not read
                pipe.close()


def _too_large(memory: int) -> str:
    """The error text for a process beyond its memory in bytes."""
    return f"it took more than {memory >> 20} MiB of memory"


# -- in the program ------------------------------------------------------------------------------------------------


def answer_jobs(answer: Callable[[bytes], bytes]) -> None:
    """Answer the jobs of stdin, until it ends. `answer` sets the limits of its job; the timer stops after it."""
    for line in sys.stdin.buffer:
        try:
            answered = answer(line)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(answered + b"\n")
        sys.stdout.buffer.flush()


def limit_job(seconds: float, memory: int) -> None:
    """Limit the job that begins: its processor time, and its address space in bytes beyond that of the libraries."""
    with contextlib.suppress(ValueError, OSError):  # macOS refuses: there the parent watches
        resource.setrlimit(resource.RLIMIT_AS, (_taken_by_libraries() + memory, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, wherever it computes


@cache
def _taken_by_libraries() -> int:
    """Bytes of address space at the first call. A library may take a gigabyte of it, by the number of processors."""
    return int(psutil.Process().memory_info().vms)
