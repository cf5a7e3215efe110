"""Installing the kernels into MLX: what models call gives the same, and MLX's own remains where ours cannot."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from phalanx.errors import ExitCode
from phalanx.kernels.install import Installed, threads_for

SCRIPT = Path(__file__).with_name("installed.py")
ROOT = Path(__file__).parents[2]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=400
    )


def test_every_entry_point_gives_mlx_results():
    done = run(str(SCRIPT))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "rms_norm" in found["installed"] and found["wrong"] == []


@pytest.mark.any_isa
def test_without_the_kernels_nothing_is_replaced():
    done = run(str(SCRIPT), PHALANX_CPU_KERNELS="0")
    assert json.loads(done.stdout) == {"installed": None, "wrong": []}


@pytest.mark.any_isa
def test_another_mlx_is_refused_with_a_remedy():
    patched = "import importlib.metadata as m; m.version = lambda name: '9.9.9'; import phalanx_cpu"
    done = run("-c", patched)
    assert done.returncode != 0
    assert "is built for mlx 0.32.4, but mlx 9.9.9 is installed" in done.stderr and "pip install" in done.stderr


@pytest.mark.any_isa
def test_without_the_package_the_log_says_what_is_lost_and_where_there_are_wheels():
    script = (
        "import importlib.util, sys; importlib.util.find_spec = lambda name: None\n"
        "from phalanx.kernels import preload; print(preload.why_not())"
    )
    said = run("-c", script).stdout
    assert "phalanx-cpu is not installed, without which models run several times slower" in said
    table = tomllib.loads((ROOT / "native/pyproject.toml").read_text())["tool"]["cibuildwheel"]
    first, *_, last = (pattern.removesuffix("-*").replace("cp3", "3.") for pattern in table["build"])
    assert f"wheels for Linux x86-64 with CPython {first} to {last}" in said


@pytest.mark.any_isa
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other processors have one instruction set")
def test_a_build_has_what_its_processor_runs():
    flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"} <= flags
    done = run("-c", "from phalanx_cpu import ops; print(ops.isas(), ops.unbuilt(), sep='|')")
    isas, unbuilt = done.stdout.strip().split("|")
    assert ("avx512" in isas.split()) == wide and unbuilt == ""


@pytest.mark.any_isa
def test_a_library_that_lacks_what_its_processor_has_says_so():
    built_elsewhere = Installed("avx2", "avx512", 2, "exact", ("matmul",))
    assert "built without avx512, which this processor has" in str(built_elsewhere)
    assert str(Installed("avx2", "", 2, "exact", ("matmul",))) == "avx2, 2 threads, precision exact: matmul"


@pytest.mark.any_isa
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


@pytest.mark.any_isa
@pytest.mark.parametrize("broken", ["rope", "quantized_matmul", "matmul"])
def test_kernels_that_compute_something_else_end_the_start(broken):
    script = (
        "import phalanx.kernels.preload as preload, sys\n"
        "from phalanx.errors import ConfigError\n"
        "from phalanx.kernels.agreement import disagreements\n"
        "from phalanx.kernels.install import active, install\n"
        "assert disagreements(preload.OPS, 'exact') == disagreements(preload.OPS, 'fast') == []\n"
        "good = preload.OPS\n"
        "class Broken:\n"
        "    def __getattr__(self, name):\n"
        "        function = getattr(good, name)\n"
        "        return (lambda *a, **k: function(*a, **k) * 1.2) if name == sys.argv[1] else function\n"
        "preload.OPS = Broken()\n"
        "for precision in ('auto', 'fast'):\n"
        "    try: install(precision, 1)\n"
        "    except ConfigError as error: print(error)\n"
        "    assert not active()\n"
    )
    done = run("-c", script, broken)
    assert done.returncode == 0, done.stderr
    name = "bits of 1" if broken == "quantized_matmul" else broken
    assert [name in line and "--no-cpu-kernels" in line for line in done.stdout.splitlines()] == [True, True]


@pytest.mark.any_isa
def test_the_mlx_that_is_named_is_the_one_it_was_built_for():
    said = run("-c", "import phalanx_cpu as p; print(p.MLX_VERSION, p.ops.MLX_VERSION)").stdout.split()
    assert said == [version("mlx")] * 2


@pytest.mark.any_isa
@pytest.mark.parametrize("flags", [("--threads", "2"), ("--cpu-precision", "fast")])
def test_flags_of_kernels_that_are_not_used_are_an_error(flags):
    done = run("-m", "phalanx", "generate", "demo", "--prompt", "x", "--no-cpu-kernels", *flags)
    assert done.returncode == ExitCode.CONFIG
    assert f"{flags[0]} applies to native CPU kernels, and none are used" in done.stderr.replace("\n", " ")


def test_a_gather_beyond_the_experts_ends_the_process_with_its_name():
    """Where an index is wrong nothing sensible can follow; it must neither hang nor go on."""
    script = (
        "import phalanx_cpu, mlx.core as mx\n"
        "a, b = mx.ones((2, 1, 8)), mx.ones((3, 8, 4))\n"
        "mx.eval(phalanx_cpu.ops.gather_mm(a, b, mx.array([0, 1]), mx.array([0, 9])))\n"
        "print('went on')\n"
    )
    done = run("-c", script)
    assert done.returncode != 0 and "went on" not in done.stdout
    assert "KernGatherMM: the kernel refused its arguments" in done.stderr
