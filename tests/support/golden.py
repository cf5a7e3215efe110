"""Answers that mlx-lm has given before, kept as long as nothing has changed that could change them.

A job is a dictionary for JSON; its "model" is a directory. Its key covers all that its answer depends on: the job, the
bytes of the model's files, the source of the code that computes, and the machine (`machine`; not the number of threads,
of which MLX has one to calculate on processors). A job without an entry is computed, never skipped, and the answer is
kept in `golden/` of the Python environment. `make golden` writes the file of this kind of processor in `tests/golden/`,
which is checked in; it leaves out what no test asks for any more.

An entry is a line: key, checksum, answer. A line that is not whole counts as none. Processes append whole lines, so any
number of them may do so at once. Answers of a GPU are kept in this process only: nothing here tells its drivers apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import mlx.core as mx

ROOT = Path(__file__).parents[2]
KEPT = Path(sys.prefix) / "golden"
ASKED = "GOLDEN_ASKED"
"""The variable that names the file in which all processes of `make golden` note what they asked for."""
ASKING = """
mlx/test_mutants.py mlx/test_ragged_rows.py native/test_packed.py e2e/test_engine.py ranks/test_control_port.py
ranks/test_launchers.py ranks/test_lockstep.py ranks/test_sixteen_bits.py ranks/test_speculating_ranks.py
ranks/test_stages.py ranks/test_tp_families.py
""".split()
"""The tests that ask."""
COMPUTE = ("mlx", "mlx-cpu", "mlx-lm")
"""Packages whose files are part of the key; of the others the version is."""
ARITHMETIC = re.compile(r"sse|ssse|avx|fma|amx|sve|asimd|vfp|(pni|f16c|xop|sme2?|bf16|i8mm|fp|fphp|neon)$")
"""Flags of processors by which libraries choose between ways to calculate."""
VARIABLES = re.compile(r"MLX_|OMP_|GOMP_|OPENBLAS|GOTO|BLIS_|MKL_|VECLIB_|GLIBC_TUNABLES|LD_")
"""Environment variables by which they do."""

Job = Mapping[str, Any]


class Golden:
    """Entries by key, from files of which one is written."""

    def __init__(self, read: Sequence[Path], write: Path | None, asked: Path | None = None) -> None:
        self._write = write
        self._asked = asked
        self._entries = {key: answer for path in read for key, answer in entries(path)}

    def answers(self, code: str, jobs: Sequence[Job], compute: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """One for each job: kept ones, and those of `compute`, which takes all jobs that have none.

        Args:
            code: the source of what computes.
        """
        models = {name: fingerprint(Path(name)) for name in {job["model"] for job in jobs}}
        here = machine()
        keys = [digest([here, code, {**job, "model": models[job["model"]]}]) for job in jobs]
        missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in self._entries}
        if missing:
            found = compute([*missing.values()])
            new = {key: json.dumps(a, separators=(",", ":")) for key, a in zip(missing, found, strict=True)}
            self._entries |= new
            try:
                append(self._write, new)
            except OSError as error:  # of an environment that another user has made, perhaps
                warnings.warn(f"{self._write} keeps no answers, so each run computes them: {error}", stacklevel=2)
        append(self._asked, {key: self._entries[key] for key in keys})
        return [json.loads(self._entries[key]) for key in keys]


def golden() -> Golden:
    """This process's."""
    asked = os.environ.get(ASKED)
    return _golden(Path(asked) if asked else None)


@cache
def _golden(asked: Path | None) -> Golden:
    if mx.default_device() != mx.Device(mx.cpu):
        return Golden([], None)
    return Golden([checked_in(), KEPT / "answers"], KEPT / "answers", asked)


def entries(path: Path) -> Iterator[tuple[str, str]]:
    """Key and answer, as JSON, of each whole line of a file that there may not be."""
    for number, line in enumerate(path.read_text(errors="replace").splitlines() if path.exists() else (), 1):
        key, _, rest = line.partition(" ")
        checksum, _, answer = rest.partition(" ")
        if checksum == digest([key, answer])[:16]:
            yield key, answer
        elif line:
            warnings.warn(f"{path}:{number} is not what was written there: its answer is computed again", stacklevel=2)


def append(path: Path | None, found: Mapping[str, str]) -> None:
    """Add entries to a file, in one piece, on a new line: another process may have been killed amid its own."""
    if path is not None and found:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{key} {digest([key, answer])[:16]} {answer}\n" for key, answer in found.items()]
        with path.open("ab", buffering=0) as file:
            file.write(("\n" + "".join(lines)).encode())


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def fingerprint(model: Path) -> str:
    """Of the bytes of all files of a model."""
    files = sorted(path for path in model.iterdir() if path.is_file())
    return digest([[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files])


def machine() -> dict[str, Any]:
    """What decides how this machine calculates, besides the code of the reference."""
    return {
        "device": [str(mx.default_device()), mx.device_info().get("architecture")],
        "processor": processor(),
        "libc": platform.libc_ver(),
        "python": sys.version_info[:2],
        "code": [found for name in COMPUTE for found in files_of(name)],
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "numpy", "tokenizers", "transformers")},
        "variables": {name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)},
    }


def processor() -> list[str]:
    """Architecture, maker, family, and the flags that matter to arithmetic."""
    file = Path("/proc/cpuinfo")
    pairs = [line.partition(":") for line in file.read_text().splitlines()] if file.exists() else []
    said = {name.strip(): value.strip() for name, _, value in reversed(pairs)}
    names = [said.get("vendor_id", said.get("CPU implementer", "")), said.get("cpu family", said.get("CPU part", ""))]
    flags = said.get("flags", said.get("Features", "")).split()
    return [platform.machine(), *names, " ".join(sorted(filter(ARITHMETIC.match, flags)))]


@cache
def files_of(package: str) -> list[list[str]]:
    """The files of an installed package that compute, by their bytes."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:  # of another backend
        return []
    code = [file for file in files if file.suffix == ".py" or ".so" in file.name or ".dylib" in file.name]
    return [[str(file), hashlib.sha256(Path(file.locate()).read_bytes()).hexdigest()] for file in sorted(code)]


def checked_in() -> Path:
    """The file of this kind of processor."""
    *names, flags = processor()
    return ROOT / "tests" / "golden" / f"{'-'.join(filter(None, names))}-{digest(flags)[:8]}.txt"


def main() -> None:
    """Run the tests that ask, and write what they asked for."""
    asked = KEPT / "asked"
    asked.unlink(missing_ok=True)
    tests = [str(ROOT / "tests" / name) for name in ASKING]
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    if subprocess.run(command, cwd=ROOT, env={**os.environ, ASKED: str(asked)}, check=False).returncode:
        sys.exit("nothing is written: not all tests that ask passed")
    target = checked_in()
    write(asked, target)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size} bytes")


def write(asked: Path, target: Path) -> None:
    """Let a file have the entries that were asked for, each once, and no others."""
    append(new := asked.with_suffix(".sorted"), dict(sorted(entries(asked))))
    target.parent.mkdir(exist_ok=True)
    new.replace(target)
    asked.unlink()


if __name__ == "__main__":
    main()
