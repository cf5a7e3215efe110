"""Fixed rules for k, and the control that a configuration asks for. Pure, as all controls."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from phalanx.config import DraftModelSpeculation, SpeculativeConfig
from phalanx.spec.balance import CostControl
from phalanx.spec.control import Committed, Control, Took, in_turn
from phalanx.spec.drafters import Draft
from phalanx.spec.purses import SHARE

FLOOR = 0.40
"""Rate of acceptance below which the field's fixed rule switches off (A8)."""
REST = 20
"""Windows for which it then rests before it begins anew; the field's own did not."""


def build(config: SpeculativeConfig, *, pack_above: int | None = None) -> Control:
    """The control that a configuration asks for; `pack_above` as in `SchedulerConfig`."""
    control: Control
    most = config.num_speculative_tokens
    match config.control:
        case "always":
            control = Always(most)
        case "floor":
            floor = FLOOR if config.floor is None else config.floor
            control = FloorControl(most, floor=floor, window=config.window)
        case "cost":
            share = SHARE if config.probe_share is None else config.probe_share
            control = CostControl(
                most, cheap=not isinstance(config, DraftModelSpeculation), share=share, pack_above=pack_above
            )
    if config.disable_by_batch_size is not None:
        control = UpToBatch(control, config.disable_by_batch_size)
    return control


class Always:
    """No control: all that is drafted is verified. For tests and for measuring what control is worth."""

    read_at_once = 128

    def __init__(self, most: int) -> None:
        self._most = most

    def read(self, room: Mapping[int, int], behind: Mapping[int, int]) -> dict[int, int]:
        return in_turn(behind, self.read_at_once)

    def has_read(self, tokens: int, seconds: float) -> None:
        pass

    def want(self, room: Mapping[int, int], *, bound: bool = False) -> dict[int, int]:
        return {key: min(n, self._most) for key, n in room.items() if n > 0}

    def choose(self, drafts: Mapping[int, Draft]) -> dict[int, int]:
        return {key: len(draft.tokens) for key, draft in drafts.items()}

    def rests(self, keys: Collection[int]) -> bool:
        return False

    def forgo(self, drafts: Mapping[int, Draft]) -> None:
        pass

    def observe(self, committed: Committed, verified: Mapping[int, int], took: Took) -> None:
        pass

    def hear(self, committed: Committed) -> None:
        pass

    def naps(self, keys: Collection[int]) -> int:
        return 0

    def slept(self, keys: Collection[int], steps: int) -> None:
        pass

    def end(self, key: int) -> None:
        pass


class UpToBatch:
    """Another control, while few rows decode; above that nothing is drafted."""

    def __init__(self, control: Control, rows: int) -> None:
        self._control = control
        self._rows = rows

    def read(self, room: Mapping[int, int], behind: Mapping[int, int]) -> dict[int, int]:
        return self._control.read(room, behind) if len(room) <= self._rows else {}

    def has_read(self, tokens: int, seconds: float) -> None:
        self._control.has_read(tokens, seconds)

    def want(self, room: Mapping[int, int], *, bound: bool = False) -> dict[int, int]:
        return self._control.want(room if len(room) <= self._rows else dict.fromkeys(room, 0), bound=bound)

    def choose(self, drafts: Mapping[int, Draft]) -> dict[int, int]:
        return self._control.choose(drafts)

    def rests(self, keys: Collection[int]) -> bool:
        return len(keys) > self._rows or self._control.rests(keys)

    def forgo(self, drafts: Mapping[int, Draft]) -> None:
        self._control.forgo(drafts)

    def observe(self, committed: Committed, verified: Mapping[int, int], took: Took) -> None:
        self._control.observe(committed, verified, took)

    def hear(self, committed: Committed) -> None:
        self._control.hear(committed)

    def naps(self, keys: Collection[int]) -> int:
        return self._control.naps(keys)  # not where a draft from a smaller batch is still being compared

    def slept(self, keys: Collection[int], steps: int) -> None:
        self._control.slept(keys, steps)

    def end(self, key: int) -> None:
        self._control.end(key)


class FloorControl(Always):
    """The field's fixed rule: off when less than `floor` of the tokens in the last `window` drafts were accepted.

    It then rests, counted in steps, and begins anew with an empty window.
    """

    def __init__(self, most: int, *, floor: float, window: int) -> None:
        super().__init__(most)
        self._floor = floor
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)  # (tokens verified, tokens right)
        self._chosen: dict[int, list[int]] = {}
        self._rest = 0

    def read(self, room: Mapping[int, int], behind: Mapping[int, int]) -> dict[int, int]:
        return {} if self._rest else super().read(room, behind)

    def want(self, room: Mapping[int, int], *, bound: bool = False) -> dict[int, int]:
        self._chosen = {}
        return {} if self._rest else super().want(room, bound=bound)

    def choose(self, drafts: Mapping[int, Draft]) -> dict[int, int]:
        self._chosen = {key: draft.tokens for key, draft in drafts.items()}
        return super().choose(drafts)

    def rests(self, keys: Collection[int]) -> bool:
        return self._rest > 1

    def observe(self, committed: Committed, verified: Mapping[int, int], took: Took) -> None:
        self._rest = max(0, self._rest - 1)
        for key, k in verified.items():
            self._recent.append((k, _right(self._chosen[key][:k], committed.get(key, ()))))
        if len(self._recent) == self._recent.maxlen:
            tried, right = (sum(column) for column in zip(*self._recent, strict=True))
            if right < self._floor * tried:
                self._rest = REST * len(self._recent)
                self._recent.clear()


def _right(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """Leading tokens of a draft that were committed."""
    for n, (drafted, token) in enumerate(zip(draft, tokens, strict=False)):
        if drafted != token:
            return n
    return min(len(draft), len(tokens))
