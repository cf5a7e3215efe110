"""Reads a GGUF file's metadata by key and type, and keeps which keys of its architecture were understood."""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.errors import ModelUnsupported, WeightsError
from phalanx.model.gguf.gguf_header import DAMAGED, shown

MAX_COUNT = (1 << 31) - 1  # MLX has sizes in 32 bits
MAX_FLOAT = 2.0**127  # about the largest float32
OTHER_FORMAT = "Download the model in mlx-lm's or Transformers' format."
IGNORED = frozenset({
    "feed_forward_length", "rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout",
    "vocab_size",
})  # fmt: skip
"""Keys that change nothing where the architecture does not ask for them."""
NEUTRAL = {
    "attention.causal": True, "expert_gating_func": 1, "expert_weights_scale": 1.0, "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0,
}  # fmt: skip
"""Keys that change nothing at this value (1 is softmax). All others do so at 0, which llama.cpp reads as not set."""


class Metadata:
    """The values of a file, by keys with or without the architecture before them."""

    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self.file = file
        self._values = values
        self._asked: set[str] = set()
        self.architecture = self.get("general.architecture", str)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value; `*.` at the start of a key stands for the architecture.

        Raises:
            WeightsError: it is of another type, or missing where there is no default.
        """
        found: Any = self.raw(key)
        found = default if found is None else found
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind or (isinstance(found, float) and not abs(found) < MAX_FLOAT):
            what = "is missing" if found is None else f"is {shown(str(found)[:64])}, not of type {kind.__name__}"
            raise self.damaged(f"{self._whole(key)} {what}")
        return found

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to `MAX_COUNT`, or an array in which it stands for each layer.

        Raises:
            WeightsError: of `get`, or it is another.
            ModelUnsupported: layers have different ones.
        """
        found: int | array.array[int] = self.raw(key)
        if isinstance(found, array.array) and found:
            if any(one != found[0] for one in found):
                raise self.refused(f"{self._whole(key)} is another in each layer")
            found = found[0]
        else:
            found = self.get(key, int, default)
        if type(found) is not int or not 1 <= found <= MAX_COUNT:
            raise self.damaged(f"{self._whole(key)} is {found}, not a number from 1 to {MAX_COUNT}")
        return found

    def strings(self, key: str) -> list[str]:
        """A list of texts."""
        found: list[str] = self.get(key, list)
        if not all(type(text) is str for text in found):
            raise self.damaged(f"{key} is not a list of texts")
        return found

    def numbers(self, key: str, length: int) -> Sequence[int]:
        """An array of so many numbers."""
        found: Sequence[int] = self.get(key, array.array)
        if len(found) != length:
            raise self.damaged(f"{self._whole(key)} has {len(found)} elements, {length} are wanted")
        return found

    def raw(self, key: str) -> Any:
        """A value of any type; None if the file has no such key."""
        whole = self._whole(key)
        self._asked.add(whole)
        return self._values.get(whole)

    def refuse_the_rest(self) -> None:
        """Check, once the configuration has been read, that no key was ignored that changes what the model computes.

        Raises:
            ModelUnsupported: the architecture has a key that nothing asked for and that is not known to be harmless.
        """
        for whole, value in self._values.items():
            prefix, _, key = whole.partition(".")
            if prefix != self.architecture or whole in self._asked or key in IGNORED:
                continue
            if value == NEUTRAL[key] if key in NEUTRAL else type(value) in (int, float, bool) and not value:
                continue
            raise self.refused(f"it has {shown(whole)}, which is not taken over")

    def _whole(self, key: str) -> str:
        return f"{self.architecture}{key[1:]}" if key.startswith("*.") else key

    def damaged(self, fault: str) -> WeightsError:
        """The error that says what is wrong with the file."""
        return WeightsError(f"{self.file} is damaged: {fault}.", remedy=DAMAGED)

    def refused(self, what: str) -> ModelUnsupported:
        """The error that says what cannot be taken over."""
        return ModelUnsupported(f"{self.file} cannot be imported: {what}.", remedy=OTHER_FORMAT)
