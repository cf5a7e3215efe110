"""Where the threads run that share a job (native/src/pool.cpp)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from kern import F32, library
from quant import AFFINE, EXACT, matmul, random_matrices

JOBS = 3000

pytestmark = [
    pytest.mark.any_isa,
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are not placed here"),
]


def work() -> None:
    """Many jobs for all threads."""
    w = random_matrices(np.random.default_rng(0), AFFINE, 4, 64, 1, 1024, 512)
    x = np.ones((1, 1, 512), np.float32)
    wanted = matmul(w, x, F32, F32, precision=EXACT)
    for _ in range(JOBS):
        assert np.array_equal(matmul(w, x, F32, F32, precision=EXACT), wanted)


def threads() -> list[int]:
    """Of this process, by the system's numbers."""
    return [int(task.name) for task in Path("/proc/self/task").iterdir()]


@pytest.mark.parametrize("processors", [1, 2])
def test_threads_may_be_where_the_process_may(processors):
    """With busy neighbours on all of them workers meet their caller, and leave its processor: for the time being."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < processors:
        pytest.skip(f"needs {processors} processors")
    chosen = ",".join(map(str, allowed[:processors]))
    command = [sys.executable, __file__, chosen]
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert done.returncode == 0, done.stderr
    count, *places = done.stdout.split()
    assert int(count) >= 4, "a thread sanitizer has one of its own"
    assert places == [chosen]


def main() -> None:
    """How many threads work on the given processors, and where all of them may be afterwards."""
    os.sched_setaffinity(0, set(map(int, sys.argv[1].split(","))))
    library.kern_set_threads(4)
    before = threads()
    work()
    for _ in range(1200):  # one may be on its way still
        places = {",".join(map(str, sorted(os.sched_getaffinity(thread)))) for thread in threads()}
        if len(places) == 1:
            break
        time.sleep(0.1)
    print(len(threads()) - len(before) + 1, *places)


if __name__ == "__main__":
    main()
