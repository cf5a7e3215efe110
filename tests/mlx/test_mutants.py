"""Deliberately broken caches must fail the same drive that the real one passes (design: Proof)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx
import pytest
from support.conformance import Drive, drive, prepare
from support.mutants import NoRollback

from phalanx.model.cache.buffers import ArenaBuffers
from phalanx.model.cache.ragged_cache import RaggedKV
from phalanx.model.cache.row_view import Mask, RowView
from phalanx.model.runner import Runner
from phalanx.sched.plan import Forward


class OneCommitSkipped(Runner):
    """One row, once, is fed at the length it had before its last commit."""

    skipped = False

    def forward(self, fwd: Forward, kv_len: Sequence[int], hidden: mx.array | None = None) -> mx.array | None:
        """Takes a token off the first row's length in the first step with at least two rows."""
        lengths = list(kv_len)
        if fwd.sample and len(lengths) > 1 and lengths[0] > 1 and not self.skipped:
            self.skipped = True
            lengths[0] -= 1
        return super().forward(fwd, lengths)


class ValuesZero(Runner):
    """Keeps keys, forgets values."""

    def forward(self, fwd: Forward, kv_len: Sequence[int], hidden: mx.array | None = None) -> mx.array | None:
        """Zeroes the values after every forward."""
        logits = super().forward(fwd, kv_len)
        for leaf in self._arena(fwd.arena).leaves:
            if isinstance(leaf, RaggedKV) and leaf.values is not None:
                leaf.values = mx.zeros_like(leaf.values)
        return logits


class _OpenMask(RowView):
    def mask(self, window: int | None, as_array: bool, first: int) -> Mask:
        mask = super().mask(window, as_array, first)
        return mx.ones_like(mask) if isinstance(mask, mx.array) else None


class _Wider(RowView):
    delta = 1

    def first(self, window: int | None) -> int:
        return super().first(None if window is None else window + self.delta)

    def mask(self, window: int | None, as_array: bool, first: int) -> Mask:
        return super().mask(None if window is None else window + self.delta, as_array, first)


class _Narrower(_Wider):
    delta = -1


class _OffsetPlusOne(RowView):
    """While decoding only: RoPE does not notice a shift of all positions."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        if not self.prefill:
            self.offset = self.offset + 1


def _viewing(view: type[RowView]) -> type[Runner]:
    class Mutant(Runner):
        def _view(self, arena: ArenaBuffers, start: int, kv_len: Sequence[int], length: int, sample: bool) -> RowView:
            return view(start, kv_len, length, mask_dims=self.facts.mask_dims, prefill=not sample)

    return Mutant


MUTANTS: dict[str, type[Runner]] = {
    "no rollback": NoRollback,
    "one commit skipped": OneCommitSkipped,
    "values zero": ValuesZero,
    "mask off": _viewing(_OpenMask),
    "offset + 1": _viewing(_OffsetPlusOne),
}
WINDOW_MUTANTS: dict[str, type[Runner]] = {"window + 1": _viewing(_Wider), "window - 1": _viewing(_Narrower)}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Drive]:
    """Of a family and the length of the longest prompt; each is prepared once."""
    return cache(
        lambda family, longest: prepare(
            family, tmp_path_factory.mktemp("mutants"), prompts=4, longest=longest, tokens=24
        )
    )


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_mutant_is_noticed(family: str, mutant: str, prepared: Callable[[str, int], Drive]) -> None:
    """Two families: heads of keys and values, and a compressed latent."""
    assert drive(prepared(family, 24), MUTANTS[mutant]).wrong


@pytest.mark.parametrize("mutant", WINDOW_MUTANTS)
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "llama:sliding", "cohere2"])
def test_window_off_by_one_is_noticed(family: str, mutant: str, prepared: Callable[[str, int], Drive]) -> None:
    """Prompts of several windows."""
    assert drive(prepared(family, 40), WINDOW_MUTANTS[mutant]).wrong


@pytest.mark.parametrize(("family", "longest"), [("llama", 24), ("deepseek_v3", 24), ("gemma3_text", 40)])
def test_the_same_drive_passes_unbroken(family: str, longest: int, prepared: Callable[[str, int], Drive]) -> None:
    """The control: a view that changes nothing."""
    assert not drive(prepared(family, longest), _viewing(RowView)).wrong
