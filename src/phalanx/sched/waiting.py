"""Sequences that wait for a row: first come, first served within an owner, fair between owners.

An owner stands for an API key. The next row goes to the owner with the fewest rows; between equals, to the earlier
sequence. So a single owner is served in order of arrival, and many sequences of one owner do not delay another's. Does
not know memory or rows (`scheduler.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from phalanx.sched.sequence import Sequence


class WaitingQueue:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Sequence]] = {}  # owner -> its sequences, the next one first; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def append(self, seq: Sequence) -> None:
        """Add a new sequence behind the others of its owner."""
        self._queues.setdefault(seq.request.owner, deque()).append(seq)

    def put_first(self, seq: Sequence) -> None:
        """Add a preempted sequence in front of the others of its owner."""
        self._queues.setdefault(seq.request.owner, deque()).appendleft(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out."""
        queue = self._queues[seq.request.owner]
        queue.remove(seq)
        if not queue:
            del self._queues[seq.request.owner]

    def by_turns(self, rows: Mapping[str, int]) -> Iterator[Sequence]:
        """Each sequence once, in the order in which they get rows.

        Args:
            rows: owner -> rows that it holds. Between two sequences the caller may change it and `remove` the last one.
        """
        rest = {owner: iter(tuple(queue)) for owner, queue in self._queues.items()}
        heads = {owner: next(sequences) for owner, sequences in rest.items()}
        while heads:
            owner = min(heads, key=lambda owner: (rows.get(owner, 0), heads[owner].number))
            yield heads.pop(owner)
            if (following := next(rest[owner], None)) is not None:
                heads[owner] = following


def victim(rows: Iterable[Sequence], held: Mapping[str, int]) -> Sequence:
    """The row to preempt: the newest one of the owner with the most rows.

    The oldest row of all is preempted only if it is the only one, so that some row always advances.

    Args:
        rows: the running sequences, at least one.
        held: owner -> rows that it holds.
    """
    return max(rows, key=lambda row: (held[row.request.owner], row.number))
