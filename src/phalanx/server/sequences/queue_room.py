"""Limits on requests that run and wait, and on the memory of their prompts, shared fairly among API keys (429)."""

from __future__ import annotations

from phalanx.errors import QueueFull
from phalanx.http.fair_quota import FairQuota

PROMPT_BODIES = 32  # of the largest size: the memory of prompts; 256 MiB are 51 prompts of 131,072 tokens
TOKEN_BYTES = 40  # per token of a prompt here: a Python number and its list entry; about as much at the leader
RETRY_AFTER_S = (1.0, 30.0)  # least and most seconds of a Retry-After header


class QueueRoom:
    """Room for choices of requests, and for their prompts.

    Args:
        max_num_seqs: choices that run.
        queue: choices that wait.
        prompt_bytes: limit for the prompts of both.
    """

    def __init__(self, *, max_num_seqs: int, queue: int, prompt_bytes: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._choices = FairQuota(max_num_seqs + queue)
        self._prompts = FairQuota(prompt_bytes)
        self._last_end: float | None = None
        self._end_interval = 1.0  # seconds between ends of sequences, smoothed

    def take_choices(self, owner: str, n: int, held: int) -> None:
        """Take room for n choices.

        Args:
            held: choices that hold a slot, for the message.

        Raises:
            QueueFull: no room now; `retry_after` estimates the seconds until there is.
        """
        if not self._choices.has_room(owner, n):
            raise QueueFull(
                f"{held} of {self._choices.capacity} slots are taken (--max-num-seqs {self._max_num_seqs} run, "
                f"--queue {self._choices.capacity - self._max_num_seqs} wait); there is no room for {n} more.",
                retry_after=self._retry_after(n),
            )
        self._choices.take(owner, n)

    def give_choices(self, owner: str, n: int) -> None:
        """Give the room of n choices back."""
        self._choices.give_back(owner, n)

    def take_prompts(self, owner: str, n_bytes: int) -> None:
        """Take memory for prompts.

        Raises:
            QueueFull: as of `take_choices`.
        """
        if not self._prompts.has_room(owner, n_bytes):
            raise QueueFull(
                f"Prompts of requests that run or wait have all of their {self._prompts.capacity >> 20} MiB "
                f"({PROMPT_BODIES} times --max-body-mb).",
                retry_after=self._retry_after(1),
            )
        self._prompts.take(owner, n_bytes)

    def give_prompts(self, owner: str, n_bytes: int) -> None:
        """Give memory of prompts back."""
        self._prompts.give_back(owner, n_bytes)

    def note_end(self, now: float) -> None:
        """A choice has ended."""
        if self._last_end is not None:
            self._end_interval = 0.8 * self._end_interval + 0.2 * (now - self._last_end)
        self._last_end = now

    def _retry_after(self, n: int) -> float:
        """Seconds until about n choices have ended, from the recent rate of ends."""
        least, most = RETRY_AFTER_S
        return min(most, max(least, n * self._end_interval))
