"""Installing the kernels into MLX: what models call gives the same, and MLX's own remains where ours cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from phalanx.kernels.install import threads_for

SCRIPT = Path(__file__).with_name("installed.py")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_every_entry_point_gives_what_mlx_gives():
    done = run(str(SCRIPT))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "rms_norm" in found["installed"] and found["wrong"] == []


def test_without_the_kernels_nothing_is_replaced():
    done = run(str(SCRIPT), PHALANX_CPU_KERNELS="0")
    assert json.loads(done.stdout) == {"installed": None, "wrong": []}


def test_another_mlx_is_refused_with_what_to_do():
    patched = "import importlib.metadata as m; m.version = lambda name: '9.9.9'; import phalanx_cpu"
    done = run("-c", patched)
    assert done.returncode != 0
    assert "is built for mlx 0.32.4, but mlx 9.9.9 is installed" in done.stderr and "pip install" in done.stderr


def test_threads_are_shared_among_the_ranks_of_a_machine():
    cores = len(os.sched_getaffinity(0))
    assert threads_for(1) == cores
    assert threads_for(2) == max(1, cores // 2)
    assert threads_for(100 * cores) == 1


def test_a_forked_child_computes_alone():
    script = (
        "import os, phalanx_cpu, mlx.core as mx; ops = phalanx_cpu.ops; ops.set_threads(4)\n"
        "import sys; sys.path.insert(0, sys.argv[1]); import numpy as np; from test_dense import Gemm, call, pointer\n"
        "a = np.ones((300, 300), np.float32); out = np.zeros_like(a)\n"
        "args = Gemm(pointer(a), pointer(a), None, pointer(out), 300, 300, 300, 300, 300, 300, 1.0)\n"
        "call('kern_gemm', args)\n"
        "pid = os.fork()\n"
        "out[:] = 0; call('kern_gemm', args); good = bool((out == 300).all())\n"
        "os._exit(0 if good else 1) if pid == 0 else sys.exit(os.waitpid(pid, 0)[1] or not good)\n"
    )
    done = run("-c", script, str(SCRIPT.parent))
    assert done.returncode == 0, done.stderr


def test_kernels_that_compute_something_else_are_not_used():
    script = (
        "import phalanx.kernels.preload as preload, logging; logging.basicConfig()\n"
        "from phalanx.kernels.install import active, disagreements, install\n"
        "assert disagreements(preload.OPS) == []\n"
        "good = preload.OPS\n"
        "class Broken:\n"
        "    def __getattr__(self, name):\n"
        "        function = getattr(good, name)\n"
        "        return (lambda *a, **k: function(*a, **k) * 1.01) if name == 'rope' else function\n"
        "preload.OPS = Broken()\n"
        "assert install('auto', 1) is None and not active()\n"
    )
    done = run("-c", script)
    assert done.returncode == 0, done.stderr
    assert "compute something else than MLX here (rope)" in done.stderr
