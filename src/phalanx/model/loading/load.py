"""Loads a model from its directory: the whole model or one rank's part of it, with little memory beyond that (B1-B5).

`prepare` checks everything before the first tensor is read; `Prepared.materialise` then reads, casts and keeps one
tensor at a time. A rank reads only what it owns (design: Loading): `lazy_model.py` knows the file tensor of each
parameter, `shard.py` the rows that this rank keeps, and `parallel.py` makes the ranks' sums go through the reducer. A
model that is not split takes the same path. Does not know caches, plans or sampling.
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
from phalanx.model.loading.lazy_model import LazyModel, build, check_config
from phalanx.model.loading.parallel import sum_through_reducer
from phalanx.model.loading.reading import CopyJob, WeightReader
from phalanx.model.loading.resolve import resolve
from phalanx.model.loading.shard import Split, StubGroup, split
from phalanx.model.loading.weights import Cut, TensorInfo, read_headers, some

__all__ = ["Loaded", "Prepared", "Progress", "load", "prepare", "resolve"]

log = logging.getLogger("phalanx.load")

Progress = Callable[[str, int, int], None]
"""Called with the phase, the bytes done and the bytes in total."""
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
READ_AHEAD = 32 << 20  # bytes of tensors (or at least two tensors) being read at once, so that the disk is never idle
CHECK_MEMORY_EVERY = memory.GB // 4  # loaded bytes between two checks of the machine's available memory
COMPUTED_WORTH_A_LINE = 1 << 20  # bytes of computed weights from which the log mentions them
UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
"""By bytes per element: the dtype in which a tensor is read, since numpy lacks some dtypes of files."""


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
    """Bytes of weights that mlx-lm computed from file tensors, which it read itself."""
    sums: int
    """Number of sites in the model where the reducer sums over ranks."""
    unchecked: tuple[str, ...]
    """Classes of the blocks that sum over ranks without the reducer, one entry per block."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter: its source in the files, and the form in which it is kept."""

    name: str
    size: int  # elements
    dtype: mx.Dtype  # as kept
    stored: int  # bytes as stored: in memory besides the result while it is cast
    nbytes: int  # bytes as kept
    source: TensorInfo | None  # None: mlx-lm computes it
    cut: Cut | None  # the rows of the source to keep; None: all
    repacked: bool  # repack it after reading

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kept part of the source."""
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
    """`prepare`, then `Prepared.materialise`.

    Args:
        guard: bytes of memory that must stay free (B2).
        on_progress: see `Progress`.
    """
    on_progress("reading headers", 0, 1)
    return prepare(path, dtype=dtype, trust_remote_code=trust_remote_code, reducer=reducer).materialise(
        guard, on_progress
    )


def prepare(path: Path, *, dtype: Dtype, trust_remote_code: bool, reducer: Reducer | None = None) -> Prepared:
    """Build a model lazily, split it and check everything. Reads only headers.

    Args:
        path: the model's directory.
        dtype: floating dtype of weights and activations; `auto`: the checkpoint's, but float32 on the CPU.
        trust_remote_code: whether to run a `model_file` of the repository.
        reducer: has this rank's number and group; None for the whole model.

    Raises:
        ModelUnsupported: mlx-lm does not know the architecture or configuration, or it cannot be split over so many
            ranks.
        WeightsError: files or tensors are missing, surplus, damaged or of the wrong shape.
    """
    check_config(path, trust_remote_code=trust_remote_code)
    built = build(path, read_headers(path), trust_remote_code=trust_remote_code)
    parts, sums = Split({}, frozenset()), 0
    unchecked: list[str] = []
    if reducer is not None and reducer.size > 1:
        if built.config.get("quantize_activations"):
            raise ModelUnsupported(f"{path.name} quantises activations: it cannot be split.", remedy="Use --tp 1.")
        group = StubGroup(reducer.rank, reducer.size) if reducer.group is None else reducer.group
        parts = split(built.model, path.name, group)
        sums, unchecked = sum_through_reducer(built.model, reducer)
    ranks = 1 if reducer is None else reducer.size
    target = DTYPES.get(dtype)
    if dtype == "auto" and mx.default_device() == mx.Device(mx.cpu):
        target = mx.float32  # on the CPU, MLX's own 16-bit kernels are 10-30 times slower
    kept_16bit = (
        keep_16bit_weights(built.model) if dtype == "auto" and target is not None and install.active() else set()
    )
    plan = _plan(built, parts, target, kept_16bit, ranks)
    return Prepared(path, built, plan, sums, tuple(unchecked), target or _main_dtype(plan))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that was built, split and checked, and whose weights are not read yet."""

    path: Path
    built: LazyModel
    plan: list[_Parameter]
    sums: int
    unchecked: tuple[str, ...]
    dtype: mx.Dtype
    """Floating dtype of the activations, and of all weights except those kept in 16 bits (`weight_only_16bit.py`)."""

    @property
    def model(self) -> Module:
        """The model. Its weights are lazy until `materialise` reads them."""
        return self.built.model

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return self.built.config

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights that this rank keeps."""
        return sum(entry.nbytes for entry in self.plan)

    @property
    def working_bytes(self) -> int:
        """Largest number of bytes in memory besides kept weights: a tensor being cast, and the ones read ahead."""
        ahead = min(READ_AHEAD, sum(entry.stored for entry in self.plan))
        pairs = zip(self.plan, [*self.plan[1:], None], strict=True)
        return max(
            (one.stored + one.nbytes + max(ahead, next_.stored if next_ else 0) for one, next_ in pairs), default=0
        )

    @property
    def quantization(self) -> str:
        """The quantisation of most weights, and in brackets those of the rest; "none" without any."""
        return _describe_quantization(self.model)

    def predict(self, rank: int, host: str, kv: int, guard: int) -> memory.Prediction:
        """Predict this rank's memory, for the table of all ranks (`memory.check_group`).

        Args:
            host: name of this machine.
            kv: bytes of KV buffers that must have room.
            guard: bytes of memory that must stay free (B2).
        """
        machine = memory.read_machine()
        return memory.Prediction(
            host=host, rank=rank, weights=self.weights_bytes, working=self.working_bytes, kv=kv, guard=guard,
            physical=machine.physical, available=machine.available,
        )  # fmt: skip

    def materialise(self, guard: int, on_progress: Progress, *, ranks_here: int = 1) -> Loaded:
        """Read the weights.

        Args:
            guard: bytes of memory that must stay free (B2).
            on_progress: see `Progress`.
            ranks_here: number of ranks that load on this machine at the same time and need as much.

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
        """Read, cast and keep one tensor after another; each stored form is freed first. Returns the bytes copied."""
        done = checked = 0
        with WeightReader(shared=ranks_here > 1) as reader:
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
                if done - checked >= CHECK_MEMORY_EVERY:
                    checked = done
                    rest = (total - done) * ranks_here
                    memory.check_fits("The rest of the weights", rest, memory.read_machine(), guard)
        mx.eval(self.model.parameters())  # the rest are views of arrays that are filled already
        return reader.copied

    def _arrays(self, reader: WeightReader) -> Iterator[tuple[_Parameter, mx.array]]:
        """Yield every tensor as stored. The next ones are read while the caller casts one."""
        lazy = dict(tree_flatten(self.model.parameters()))
        pages = HugePages(
            {
                entry.name: entry.nbytes
                for entry in self.plan
                if entry.source is not None and entry.dtype == lazy[entry.name].dtype
            }
        )
        pending: deque[_PendingTensor] = deque()
        ahead = 0
        for entry in self.plan:
            pending.append(_PendingTensor.begin(reader, entry, lazy.pop(entry.name), pages))
            ahead += entry.stored
            while len(pending) > 1 and ahead > READ_AHEAD:
                ahead -= pending[0].entry.stored
                yield pending.popleft().wait()
        while pending:
            yield pending.popleft().wait()


@dataclass(frozen=True, slots=True)
class _PendingTensor:
    """A tensor that is being read from its file into MLX's memory, or that mlx-lm will compute."""

    entry: _Parameter
    array: mx.array
    copy: CopyJob | None
    staging: npt.NDArray[np.uint8] | None  # the buffer to read into, if not that of `array`

    @staticmethod
    def begin(reader: WeightReader, entry: _Parameter, lazy: mx.array, pages: HugePages) -> _PendingTensor:
        """Start to read the kept part of a tensor."""
        if entry.source is None or not entry.source.nbytes:
            return _PendingTensor(entry, lazy, None, None)
        buffer = pages.buffer(entry.name, entry.shape, UNSIGNED[lazy.dtype.size])
        staging = None
        if mx.cuda.is_available():  # the processor cannot write to a device's own memory
            staging = np.empty(buffer.nbytes, np.uint8)
        out = np.array(buffer, copy=False).reshape(-1).view(np.uint8) if staging is None else staging
        return _PendingTensor(entry, buffer.view(lazy.dtype), reader.begin(entry.source, entry.cut, out), staging)

    def wait(self) -> tuple[_Parameter, mx.array]:
        """Wait until it is read. Returns the parameter and its array as stored."""
        if self.copy is not None:
            self.copy.wait()
        if self.staging is None:
            return self.entry, self.array
        return self.entry, mx.array(self.staging).view(self.array.dtype).reshape(self.array.shape)


def _plan(
    built: LazyModel, parts: Split, target: mx.Dtype | None, kept_16bit: set[str], ranks: int
) -> list[_Parameter]:
    """Source and dtype of every parameter, in the order of the files; computed ones come last.

    Args:
        target: dtype to which floating parameters are cast; None: no cast.
        kept_16bit: names of parameters that are not cast in any case.
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
        entries.append(_Parameter(name, array.size, kept, stored, nbytes, source, cut, repacked=name in repacking))
    return sorted(entries, key=_file_position)


def _file_position(entry: _Parameter) -> tuple[bool, str, int]:
    source = entry.source
    return (True, "", 0) if source is None else (False, str(source.file), source.start)


def _cast_predicate(model: Module, target: mx.Dtype | None) -> Callable[[str], bool]:
    """Whether to cast a floating parameter to the target. A model can exempt parameters from 16 bits."""
    if target == mx.float32:
        return lambda name: True
    own = getattr(model, "cast_predicate", None) or (lambda name: True)
    return lambda name: bool(own(name)) and not name.endswith(".global_scale")


def _main_dtype(plan: list[_Parameter]) -> mx.Dtype:
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
