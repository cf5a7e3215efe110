"""Random requests to an engine: arrivals, cancellations and stops by the server.

One generator of moves drives the simulation of leader and workers (`unit/sched/test_simulated_lockstep.py`) and groups
of real ranks (`ranks/test_lockstep.py`). Randomness comes from outside, so that hypothesis can shrink it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from phalanx.types import Sampling, SequenceRequest, StopRule


@dataclass
class Play:
    """The requests so far, and the ids that were cancelled or stopped."""

    vocab: int
    longest_prompt: int
    longest_answer: int
    requests: dict[str, SequenceRequest] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    finishes: dict[str, int] = field(default_factory=dict)

    def arrive(self, rnd: Random) -> list[SequenceRequest]:
        """A new request of one to three choices; its prompt may begin as an earlier one does."""
        number = len(self.requests)
        prompt = [rnd.randrange(3, self.vocab) for _ in range(rnd.randint(1, self.longest_prompt))]
        if self.requests and rnd.random() < 0.3:
            earlier = self.requests[rnd.choice(sorted(self.requests))].prompt
            prompt = (earlier[: rnd.randint(1, len(earlier))] + prompt)[: self.longest_prompt]
        stop = StopRule(
            max_tokens=rnd.randint(1, self.longest_answer),
            stop_ids=frozenset(rnd.randrange(self.vocab) for _ in range(rnd.choice((0, 0, 1, 3)))),
        )
        owner = rnd.choice(("", "", "key 1", "key 2"))
        arrived = []
        for choice in range(rnd.choice((1, 1, 1, 3))):
            request = SequenceRequest(
                id=f"{number}/{choice}",
                group=str(number),
                prompt=prompt,
                sampling=Sampling(temperature=0.0, choice=choice),
                stop=stop,
                owner=owner,
            )
            self.requests[request.id] = request
            arrived.append(request)
        return arrived

    def cancel(self, rnd: Random) -> str | None:
        """Cancel a random request, in whatever state it is. Returns its id."""
        if not self.requests:
            return None
        leaving = rnd.choice(sorted(self.requests))
        self.cancelled.add(leaving)
        return leaving

    def expected(self, request: SequenceRequest, whole: list[int]) -> list[int]:
        """The tokens that a request must have received; `whole` is its answer without a stop by the server."""
        n = self.finishes.get(request.id)
        return whole if n is None else whole[:n]
