"""A model from its directory into memory: the whole of it, or one rank's part, and never much more (B1-B5).

Everything that can go wrong is checked before the first tensor is read (`prepare`); then tensors are read, cast and
kept one at a time (`Prepared.materialise`). Reads only what this rank owns (design: Loading): `origin.py` knows which
parameter is which file tensor, `shard.py` which rows of it are this rank's, `parallel.py` lets the ranks' sums go
through the reducer. A model that is not split takes the same path.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten

from phalanx import memory
from phalanx.config import Dtype
from phalanx.dist.reduce import Reducer
from phalanx.errors import ModelUnsupported
from phalanx.kernels import install
from phalanx.model.cpu.repack import repackable
from phalanx.model.cpu.weight_only_16bit import keep_16bit_weights
from phalanx.model.loading.huge_pages import HugePages
from phalanx.model.loading.lazy_model import Built, build, check_config
from phalanx.model.loading.parallel import take_over
from phalanx.model.loading.reading import Copying, Reader
from phalanx.model.loading.resolve import resolve
from phalanx.model.loading.shard import Paper, Split, split
from phalanx.model.loading.weights import Cut, TensorInfo, read_headers, some

__all__ = ["Loaded", "Prepared", "Progress", "load", "prepare", "resolve"]

log = logging.getLogger("phalanx.load")

Progress = Callable[[str, int, int], None]
"""Called with a phase, bytes done and bytes in all."""
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
AHEAD = 32 << 20  # bytes of tensors that are on their way at once, or two tensors: so the disk has always work
CHECK_EVERY = memory.GB // 4  # bytes between two looks at the machine's memory while loading
COMPUTED_WORTH_A_LINE = 1 << 20  # bytes
UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
"""By bytes per element: what a tensor is read as, since not every dtype of a file is one of numpy's."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, or this rank's part of it, whose weights are in memory."""

    model: Module
    config: dict[str, Any]
    path: Path
    dtype: mx.Dtype
    """Floating dtype of the activations."""
    quantization: str
    """"4-bit affine g64", "mxfp4 g32", "none", ..."""
    weights_bytes: int
    load_s: float
    active_bytes: int
    """MLX's active memory after loading."""
    peak_bytes: int
    """MLX's peak memory while loading."""
    copied_bytes: int
    """Bytes copied from the files by this rank."""
    computed_bytes: int
    """Bytes of weights that mlx-lm computed from the files, reading them by itself."""
    sums: int
    """Places in the model where the ranks' results are added up by the reducer."""
    unchecked: tuple[str, ...]
    """Classes of the blocks whose sums mlx-lm makes by itself, one entry per block."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter: where it comes from and what it becomes."""

    name: str
    size: int
    dtype: mx.Dtype
    stored: int  # bytes that are in memory besides the result while it is made
    nbytes: int  # bytes as kept
    source: TensorInfo | None  # None: mlx-lm computes it
    cut: Cut | None  # the rows of the source; None is all
    repacked: bool  # once it has been read

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part of the source that is kept."""
        assert self.source is not None
        return self.source.shape if self.cut is None else self.cut.shape(self.source.shape)


def load(
    path: Path,
    *,
    dtype: Dtype,
    guard: int,
    trust_remote_code: bool,
    on_progress: Progress,
    reducer: Reducer | None = None,
) -> Loaded:
    """`prepare` and `Prepared.materialise` in one.

    Args:
        guard: bytes of memory that stay free (B2).
        on_progress: see `Progress`.
    """
    on_progress("reading headers", 0, 1)
    return prepare(path, dtype=dtype, trust_remote_code=trust_remote_code, reducer=reducer).materialise(
        guard, on_progress
    )


def prepare(path: Path, *, dtype: Dtype, trust_remote_code: bool, reducer: Reducer | None = None) -> Prepared:
    """Build a model lazily and split it; everything is checked, nothing is read but headers.

    Args:
        path: its directory.
        dtype: floating dtype of everything; `auto` is the checkpoint's, except float32 on the CPU.
        trust_remote_code: whether a `model_file` of the repository may be run.
        reducer: this rank's place in a group, and how its sums are made; None for the whole model.

    Raises:
        ModelUnsupported: the architecture or configuration is not one that mlx-lm knows, or cannot be split so.
        WeightsError: files or tensors are missing, surplus, damaged or of the wrong shape.
    """
    check_config(path, trust_remote_code=trust_remote_code)
    built = build(path, read_headers(path), trust_remote_code=trust_remote_code)
    parts, sums = Split({}, frozenset()), 0
    unchecked: list[str] = []
    if reducer is not None and reducer.size > 1:
        if built.config.get("quantize_activations"):
            raise ModelUnsupported(f"{path.name} quantises activations: it cannot be split.", remedy="Use --tp 1.")
        group = Paper(reducer.rank, reducer.size) if reducer.group is None else reducer.group
        parts = split(built.model, path.name, group)
        sums, unchecked = take_over(built.model, reducer)
    ranks = 1 if reducer is None else reducer.size
    target = DTYPES.get(dtype)
    if dtype == "auto" and mx.default_device() == mx.Device(mx.cpu):
        target = mx.float32  # MLX's own 16-bit kernels are 10-30 times slower there
    kept_16bit = (
        keep_16bit_weights(built.model) if dtype == "auto" and target is not None and install.active() else set()
    )
    plan = _plan(built, parts, target, kept_16bit, ranks)
    return Prepared(path, built, plan, sums, tuple(unchecked), target or _main_dtype(plan))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is ready to be read."""

    path: Path
    built: Built
    plan: list[_Entry]
    sums: int
    unchecked: tuple[str, ...]
    dtype: mx.Dtype
    """Floating dtype of the activations, and of all weights but those that only products read."""

    @property
    def model(self) -> Module:
        """The model; its weights are lazy, or the part of them that is already read."""
        return self.built.model

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return self.built.config

    @property
    def weights_bytes(self) -> int:
        """Bytes this rank keeps."""
        return sum(entry.nbytes for entry in self.plan)

    @property
    def working_bytes(self) -> int:
        """Bytes in memory for a moment besides those kept: a tensor being cast, and the next on their way."""
        ahead = min(AHEAD, sum(entry.stored for entry in self.plan))
        pairs = zip(self.plan, [*self.plan[1:], None], strict=True)
        return max(
            (one.stored + one.nbytes + max(ahead, next_.stored if next_ else 0) for one, next_ in pairs), default=0
        )

    @property
    def quantization(self) -> str:
        """How most of the weights are quantised, and in how many ways the rest."""
        return _describe_quantization(self.model)

    def predict(self, rank: int, host: str, kv: int, guard: int) -> memory.Prediction:
        """What this rank will take, for the table of all ranks (`memory.check_group`).

        Args:
            host: the name of this machine.
            kv: bytes of KV buffers there must be room for.
            guard: bytes of memory that stay free (B2).
        """
        machine = memory.read_machine()
        return memory.Prediction(
            host=host, rank=rank, weights=self.weights_bytes, working=self.working_bytes, kv=kv, guard=guard,
            physical=machine.physical, available=machine.available,
        )  # fmt: skip

    def materialise(self, guard: int, on_progress: Progress, *, ranks_here: int = 1) -> Loaded:
        """Read the weights.

        Args:
            guard: bytes of memory that stay free (B2).
            on_progress: see `Progress`.
            ranks_here: ranks on this machine that load at the same time and need as much.

        Raises:
            MemoryShortage: the weights do not fit, or memory ran out while loading.
            WeightsError: a file cannot be read.
        """
        started = time.perf_counter()
        mx.reset_peak_memory()
        total = self.weights_bytes
        machine = memory.read_machine()
        log.info(
            "loading %.2f GB of weights from %s (%.2f GB of %.2f GB memory available, %.2f GB active)",
            total / memory.GB, self.path, machine.available / memory.GB, machine.physical / memory.GB,
            mx.get_active_memory() / memory.GB,
        )  # fmt: skip
        memory.check_fits(f"Loading {self.path.name}", (total + self.working_bytes) * ranks_here, machine, guard)
        copied = self._read(total, guard, on_progress, ranks_here)
        loaded = Loaded(
            model=self.model,
            config=self.config,
            path=self.path,
            dtype=self.dtype,
            quantization=self.quantization,
            weights_bytes=total,
            load_s=time.perf_counter() - started,
            active_bytes=mx.get_active_memory(),
            peak_bytes=mx.get_peak_memory(),
            copied_bytes=copied,
            computed_bytes=sum(entry.nbytes for entry in self.plan if entry.source is None),
            sums=self.sums,
            unchecked=self.unchecked,
        )
        _report(loaded)
        return loaded

    def _read(self, total: int, guard: int, on_progress: Progress, ranks_here: int) -> int:
        """Read, cast and keep one tensor after the other; the file's version of each is gone before the next."""
        done = checked = 0
        with Reader(shared=ranks_here > 1) as reader:
            for entry, array in self._arrays(reader):
                if entry.source is None or array.dtype != entry.dtype:
                    array = array.astype(entry.dtype)
                    mx.eval(array)
                    mx.clear_cache()
                if entry.repacked:
                    mx.eval(array)
                    array = install.repack(array)
                self.model.update(tree_unflatten([(entry.name, array)]))
                del array
                done += entry.nbytes
                on_progress("loading weights", done, total)
                if done - checked >= CHECK_EVERY:
                    checked = done
                    rest = (total - done) * ranks_here
                    memory.check_fits("The rest of the weights", rest, memory.read_machine(), guard)
        mx.eval(self.model.parameters())  # what is left are views of memory that is filled
        return reader.copied

    def _arrays(self, reader: Reader) -> Iterator[tuple[_Entry, mx.array]]:
        """Every tensor as stored; while one is cast and kept, the next ones are being copied."""
        lazy = dict(tree_flatten(self.model.parameters()))
        pages = HugePages(
            {
                entry.name: entry.nbytes
                for entry in self.plan
                if entry.source is not None and entry.dtype == lazy[entry.name].dtype
            }
        )
        coming: deque[_Coming] = deque()
        ahead = 0
        for entry in self.plan:
            coming.append(_Coming.begin(reader, entry, lazy.pop(entry.name), pages))
            ahead += entry.stored
            while len(coming) > 1 and ahead > AHEAD:
                ahead -= coming[0].entry.stored
                yield coming.popleft().arrived()
        while coming:
            yield coming.popleft().arrived()


@dataclass(frozen=True, slots=True)
class _Coming:
    """A tensor on its way from its file into memory of MLX's own, or one that mlx-lm will compute."""

    entry: _Entry
    array: mx.array
    copying: Copying | None
    staging: npt.NDArray[np.uint8] | None  # where it is copied to if not into `array`

    @staticmethod
    def begin(reader: Reader, entry: _Entry, lazy: mx.array, pages: HugePages) -> _Coming:
        """Begin to copy the part of a tensor that is kept."""
        if entry.source is None or not entry.source.nbytes:
            return _Coming(entry, lazy, None, None)
        here = pages.buffer(entry.name, entry.shape, UNSIGNED[lazy.dtype.size])
        staging = None
        if mx.cuda.is_available():  # a device may have memory of its own, which cannot be written from here
            staging = np.empty(here.nbytes, np.uint8)
        out = np.array(here, copy=False).reshape(-1).view(np.uint8) if staging is None else staging
        return _Coming(entry, here.view(lazy.dtype), reader.begin(entry.source, entry.cut, out), staging)

    def arrived(self) -> tuple[_Entry, mx.array]:
        """Wait for it."""
        if self.copying is not None:
            self.copying.wait()
        if self.staging is None:
            return self.entry, self.array
        return self.entry, mx.array(self.staging).view(self.array.dtype).reshape(self.array.shape)


def _plan(built: Built, parts: Split, target: mx.Dtype | None, kept_16bit: set[str], ranks: int) -> list[_Entry]:
    """Source and dtype of every parameter, in the order of the files; what is computed comes last.

    Args:
        target: what floating parameters are cast to; None leaves them.
        kept_16bit: names of those that are left in any case.
    """
    castable = _cast_predicate(built.model, target)
    repacking = repackable(built.model, lambda name: name in parts.computed or name not in built.origins)
    entries = []
    for name, array in tree_flatten(built.model.parameters()):
        floating = mx.issubdtype(array.dtype, mx.floating)
        kept = target if target is not None and floating and castable(name) else array.dtype
        kept = array.dtype if name in kept_16bit else kept
        source = None if name in parts.computed else built.origins.get(name)
        cut = None if source is None else parts.cuts.get(name)
        split_up = name in parts.computed or name in parts.cuts
        stored = array.nbytes * (ranks if source is None and split_up else 1)
        nbytes = array.size * kept.size
        entries.append(_Entry(name, array.size, kept, stored, nbytes, source, cut, repacked=name in repacking))
    return sorted(entries, key=_place)


def _place(entry: _Entry) -> tuple[bool, str, int]:
    source = entry.source
    return (True, "", 0) if source is None else (False, str(source.file), source.start)


def _cast_predicate(model: Module, target: mx.Dtype | None) -> Callable[[str], bool]:
    """Which floating parameters follow the target; those a model wants in float32 are left out of 16 bits."""
    if target == mx.float32:
        return lambda name: True
    own = getattr(model, "cast_predicate", None) or (lambda name: True)
    return lambda name: bool(own(name)) and not name.endswith(".global_scale")


def _main_dtype(plan: list[_Entry]) -> mx.Dtype:
    sizes: Counter[mx.Dtype] = Counter()
    for entry in plan:
        if mx.issubdtype(entry.dtype, mx.floating):
            sizes[entry.dtype] += entry.size
    return sizes.most_common(1)[0][0] if sizes else mx.float32


def _describe_quantization(model: Module) -> str:
    kinds: Counter[str] = Counter()
    for _, module in model.named_modules():
        bits, group, mode = (getattr(module, field, None) for field in ("bits", "group_size", "mode"))
        if isinstance(bits, int) and isinstance(group, int) and isinstance(module.get("weight"), mx.array):
            name = f"{bits}-bit affine" if mode in (None, "affine") else str(mode)
            kinds[f"{name} g{group}"] += module["weight"].nbytes
    if not kinds:
        return "none"
    (most, _), *others = kinds.most_common()
    return most + (f" (also {', '.join(kind for kind, _ in others)})" if others else "")


def _report(loaded: Loaded) -> None:
    log.info(
        "loaded in %.1f s: %s, quantization %s, active memory %.2f GB, peak %.2f GB; %.2f GB copied from files",
        loaded.load_s, loaded.dtype, loaded.quantization,
        loaded.active_bytes / memory.GB, loaded.peak_bytes / memory.GB, loaded.copied_bytes / memory.GB,
    )  # fmt: skip
    if loaded.computed_bytes > COMPUTED_WORTH_A_LINE:
        log.info("%.2f GB of weights are computed by mlx-lm from whole tensors", loaded.computed_bytes / memory.GB)
    if loaded.unchecked:
        log.warning(
            "%d reductions are checked; those of %d blocks are mlx-lm's own and are not: %s",
            loaded.sums, len(loaded.unchecked), some(sorted(set(loaded.unchecked))),
        )  # fmt: skip
