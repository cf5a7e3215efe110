"""Controls with fixed rules, and the factory of the configured control."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from phalanx.spec.adaptive import AdaptiveControl
from phalanx.spec.budget import PROBE_SHARE
from phalanx.spec.control import Committed, Control, DraftPrefill, StepTime, share_out
from phalanx.spec.drafters import Draft
from phalanx.speculation_config import DraftModelSpeculation, SpeculativeConfig

FLOOR = 0.40  # rate of acceptance below which `FloorControl` switches drafts off
BACKOFF = 20  # windows of steps for which it stays off before it tries again
READ_AT_ONCE = 128  # prompt tokens that a draft model reads per step under these rules


def build(config: SpeculativeConfig, *, pack_above: int | None = None) -> Control:
    """The configured control; `pack_above` as of `AdaptiveControl`."""
    most = config.num_speculative_tokens
    match config.control:
        case "always":
            return Always(most)
        case "floor":
            return FloorControl(most, floor=FLOOR if config.floor is None else config.floor, window=config.window)
        case "cost":
            share = PROBE_SHARE if config.probe_share is None else config.probe_share
            cheap = not isinstance(config, DraftModelSpeculation)
            return AdaptiveControl(most, cheap=cheap, share=share, pack_above=pack_above)


class Always(Control):
    """Verifies all drafted tokens. For tests, and as a baseline in measurements."""

    def __init__(self, most: int) -> None:
        self._most = most

    def request(
        self, room: Mapping[int, int], unread: Mapping[int, DraftPrefill], *, overlapped: bool
    ) -> dict[int, int]:
        if overlapped:
            return {}
        return share_out(unread, READ_AT_ONCE) | {key: min(n, self._most) for key, n in room.items() if n > 0}

    def choose(self, drafts: Mapping[int, Draft]) -> dict[int, int]:
        return {key: len(draft.tokens) for key, draft in drafts.items()}

    def can_overlap(self, keys: Collection[int]) -> bool:
        return False

    def observe(self, committed: Committed, verified: Mapping[int, int], time: StepTime | None) -> int:
        return 0

    def end(self, key: int) -> None:
        pass


class FloorControl(Always):
    """Other servers' fixed rule: off when less than `floor` of the tokens in the last `window` drafts were accepted. It
    stays off for a number of steps, then starts again with an empty window."""

    def __init__(self, most: int, *, floor: float, window: int) -> None:
        super().__init__(most)
        self._floor = floor
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)  # (tokens verified, tokens right)
        self._off = 0  # steps left

    def request(
        self, room: Mapping[int, int], unread: Mapping[int, DraftPrefill], *, overlapped: bool
    ) -> dict[int, int]:
        return {} if self._off else super().request(room, unread, overlapped=overlapped)

    def can_overlap(self, keys: Collection[int]) -> bool:
        return self._off > 1

    def observe(self, committed: Committed, verified: Mapping[int, int], time: StepTime | None) -> int:
        self._off = max(0, self._off - (time is not None))
        self._recent.extend((k, max(0, min(k, len(committed.get(key, ())) - 1))) for key, k in verified.items())
        if len(self._recent) == self._recent.maxlen:
            tried, right = (sum(column) for column in zip(*self._recent, strict=True))
            if right < self._floor * tried:
                self._off = BACKOFF * len(self._recent)
                self._recent.clear()
        return 0
