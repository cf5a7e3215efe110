"""Loads a model from its directory: the whole model or one rank's part of it, with little memory beyond that (B1-B5).

`prepare` checks everything before the first tensor is read; `Prepared.materialise` then reads, casts and keeps one
tensor at a time. A rank reads only what it owns (design: Loading): `lazy_model.py` knows the file tensor of each
parameter, `shard.py` the rows that this rank keeps, and `parallel.py` makes the ranks' sums go through the reducer. A
model that is not split takes the same path.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
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
from phalanx.model.cpu.weight_only_16bit import keep_16bit_weights
from phalanx.model.device_memory import read_memory
from phalanx.model.loading.factored_scales import factor_scales
from phalanx.model.loading.huge_pages import HugePages
from phalanx.model.loading.lazy_model import LazyModel, build, check_config
from phalanx.model.loading.parallel import sum_through_reducer
from phalanx.model.loading.parameters import ModelParameter, gpu_dtype, main_dtype, plan_parameters
from phalanx.model.loading.reading import CopyJob, WeightReader
from phalanx.model.loading.resolve import resolve
from phalanx.model.loading.shard import Split, StubGroup, split
from phalanx.model.loading.stage_cut import Choice, choose, fill_absent
from phalanx.model.loading.weight_files import some
from phalanx.model.loading.weights import read_headers
from phalanx.model.stage import Stage

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
    stage: Stage | None
    """The layers of this rank; None if it has all."""


def load(
    path: Path,
    *,
    dtype: Dtype,
    guard: int,
    trust_remote_code: bool,
    on_progress: Progress,
    reducer: Reducer | None = None,
    choose_layers: Choice | None = None,
) -> Loaded:
    """`prepare`, then `Prepared.materialise`.

    Args:
        guard: bytes of memory that must stay free.
        on_progress: see `Progress`.
    """
    on_progress("reading headers", 0, 1)
    prepared = prepare(
        path, dtype=dtype, trust_remote_code=trust_remote_code, reducer=reducer, choose_layers=choose_layers
    )
    return prepared.materialise(guard, on_progress)


def prepare(
    path: Path,
    *,
    dtype: Dtype,
    trust_remote_code: bool,
    reducer: Reducer | None = None,
    choose_layers: Choice | None = None,
) -> Prepared:
    """Build a model lazily, split it and check everything. Reads only headers.

    Args:
        path: the model's directory.
        dtype: floating dtype of weights and activations; `auto`: float32 on the CPU, `gpu_dtype` on a GPU.
        trust_remote_code: whether to run a `model_file` of the repository.
        reducer: has this rank's number and group; None for the whole model.
        choose_layers: chooses the layers of this rank's stage; None for all layers.

    Raises:
        ModelUnsupported: mlx-lm does not know the architecture or configuration, or it cannot be cut into stages or
            split over so many ranks.
        WeightsError: files or tensors are missing, surplus, damaged or of the wrong shape.
    """
    config = check_config(path, trust_remote_code=trust_remote_code)
    built = build(path, config, read_headers(path), trust_remote_code=trust_remote_code)
    parts, sums = Split({}, frozenset()), 0
    unchecked: list[str] = []
    cutting = None if choose_layers is None else choose(built.model, built.config, path.name, choose_layers)
    if reducer is not None and reducer.size > 1:
        if built.config.get("quantize_activations"):
            raise ModelUnsupported(f"{path.name} quantises activations: it cannot be split.", remedy="Use --tp 1.")
        group = StubGroup(reducer.rank, reducer.size) if reducer.group is None else reducer.group
        parts = split(built.model, path.name, group)
    stage = None if cutting is None else cutting.cut()
    if reducer is not None and reducer.size > 1:
        sums, unchecked = sum_through_reducer(built.model, reducer)
    ranks = 1 if reducer is None else reducer.size
    target = DTYPES.get(dtype)
    if dtype == "auto" and mx.default_device() == mx.Device(mx.cpu):
        target = mx.float32  # on the CPU, MLX's own 16-bit kernels are 10-30 times slower
    elif dtype == "auto":
        target = gpu_dtype(dict(tree_flatten(built.model.parameters())), str(built.config["model_type"]))
    kept_16bit = (
        keep_16bit_weights(built.model) if dtype == "auto" and target is not None and install.active() else set()
    )
    absent = frozenset() if cutting is None else cutting.absent()
    plan = plan_parameters(built, parts, target, kept_16bit, ranks, absent)
    kept = fill_absent(built.model, plan, absent)
    return Prepared(path, built, kept, sums, tuple(unchecked), target or main_dtype(plan), stage)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that was built, split and checked, and whose weights are not read yet."""

    path: Path
    built: LazyModel
    plan: list[ModelParameter]
    sums: int
    unchecked: tuple[str, ...]
    dtype: mx.Dtype
    """Floating dtype of the activations, and of all weights except those kept in 16 bits (`weight_only_16bit.py`)."""
    stage: Stage | None
    """The layers of this rank; None if it has all."""

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
            guard: bytes of memory that must stay free.
        """
        return memory.Prediction(
            host=host, rank=rank, weights=self.weights_bytes, working=self.working_bytes, kv=kv, guard=guard,
            machine=read_memory(),
        )  # fmt: skip

    def materialise(self, guard: int, on_progress: Progress, *, ranks_here: int = 1, sharing: int = 1) -> Loaded:
        """Read the weights.

        Args:
            guard: bytes of memory that must stay free.
            on_progress: see `Progress`.
            ranks_here, sharing: numbers of ranks that read the same files at the same time, and into the same memory.

        Raises:
            MemoryShortage: the weights do not fit, or memory ran out while loading.
            WeightsError: a file cannot be read.
        """
        started = time.perf_counter()
        mx.reset_peak_memory()
        total = self.weights_bytes
        machine = read_memory(sharing)
        log.info(
            "loading %.2f GiB of weights from %s (%.2f GiB of %.2f GiB memory available, %.2f GiB active)",
            total / memory.GB, self.path, machine.available / memory.GB, machine.total / memory.GB,
            mx.get_active_memory() / memory.GB,
        )  # fmt: skip
        memory.check_fits(f"Loading {self.path.name}", (total + self.working_bytes) * sharing, machine, guard)
        copied, rounded = self._read(total, guard, on_progress, ranks_here, sharing)
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
            stage=self.stage,
        )
        _report(loaded)
        if rounded:
            worst = max(rounded, key=rounded.__getitem__)
            log.warning(
                "scales of 32 bits are rounded to %s: weights differ by at most %.2g (%s); --dtype float32 keeps them",
                str(self.dtype).removeprefix("mlx.core."), rounded[worst], worst,
            )  # fmt: skip
        return loaded

    def _read(
        self, total: int, guard: int, on_progress: Progress, ranks_here: int, sharing: int
    ) -> tuple[int, Mapping[str, float]]:
        """Read, cast and keep one tensor after another; each stored form is freed first.

        Returns:
            The bytes copied, and by modules whose scales are rounded: by how much a weight differs, at most.
        """
        done = checked = 0
        rounded: defaultdict[str, float] = defaultdict(float)
        widths = ((path, getattr(module, "bits", None)) for path, module in self.model.named_modules())
        bits = {path: width for path, width in widths if isinstance(width, int)}
        with WeightReader(shared=ranks_here > 1) as reader:
            for entry, array in self._arrays(reader):
                if entry.source is None or array.dtype != entry.dtype:
                    stored, array = array, array.astype(entry.dtype)
                    mx.eval(array)
                    module, _, field = entry.name.rpartition(".")
                    if module in bits and field in ("scales", "biases") and stored.dtype.size > array.dtype.size:
                        largest = 2 ** bits[module] - 1 if field == "scales" else 1  # the largest code
                        rounded[module] += largest * _rounding(stored, array)
                    del stored
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
                    rest = (total - done) * sharing
                    memory.check_fits("The rest of the weights", rest, read_memory(sharing), guard)
        factor_scales(self.model, {entry.name for entry in self.plan if entry.repacked})
        mx.eval(self.model.parameters())  # the rest are views of arrays that are filled already
        return reader.copied, rounded

    def _arrays(self, reader: WeightReader) -> Iterator[tuple[ModelParameter, mx.array]]:
        """Yield every tensor as stored. The next ones are read while the caller casts one."""
        lazy = dict(tree_flatten(self.model.parameters()))
        pages = HugePages(
            {
                entry.name: entry.nbytes
                for entry in self.plan
                if entry.source is not None and entry.dtype == lazy[entry.name].dtype and not entry.may_shrink
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

    entry: ModelParameter
    array: mx.array
    copy: CopyJob | None
    staging: npt.NDArray[np.uint8] | None  # the buffer to read into, if not that of `array`

    @staticmethod
    def begin(reader: WeightReader, entry: ModelParameter, lazy: mx.array, pages: HugePages) -> _PendingTensor:
        """Start to read the kept part of a tensor."""
        if entry.source is None or not entry.source.nbytes:
            return _PendingTensor(entry, lazy, None, None)
        buffer = pages.buffer(entry.name, entry.shape, UNSIGNED[lazy.dtype.size])
        staging = None
        if mx.cuda.is_available():  # the processor cannot write to a device's own memory
            staging = np.empty(buffer.nbytes, np.uint8)
        out = np.array(buffer, copy=False).reshape(-1).view(np.uint8) if staging is None else staging
        return _PendingTensor(entry, buffer.view(lazy.dtype), reader.begin(entry.source, entry.cut, out), staging)

    def wait(self) -> tuple[ModelParameter, mx.array]:
        """Wait until it is read. Returns the parameter and its array as stored."""
        if self.copy is not None:
            self.copy.wait()
        if self.staging is None:
            return self.entry, self.array
        return self.entry, mx.array(self.staging).view(self.array.dtype).reshape(self.array.shape)


def _rounding(stored: mx.array, kept: mx.array) -> float:
    """The largest difference between numbers and their rounded ones."""
    return float(np.asarray(mx.abs(kept.astype(stored.dtype) - stored)).max(initial=0.0))


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
        "loaded in %.1f s: %s, quantization %s, active memory %.2f GiB, peak %.2f GiB; %.2f GiB copied from files",
        loaded.load_s, loaded.dtype, loaded.quantization,
        loaded.active_bytes / memory.GB, loaded.peak_bytes / memory.GB, loaded.copied_bytes / memory.GB,
    )  # fmt: skip
    if loaded.computed_bytes > COMPUTED_WORTH_A_LINE:
        log.info("%.2f GiB of weights are computed by mlx-lm from whole tensors", loaded.computed_bytes / memory.GB)
    if loaded.unchecked:
        log.warning(
            "%d reductions are checked; those of %d blocks are mlx-lm's own and are not: %s",
            loaded.sums, len(loaded.unchecked), some(sorted(set(loaded.unchecked))),
        )  # fmt: skip
