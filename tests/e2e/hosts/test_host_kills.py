"""Ranks, agents, links and supervisors' processes of a cluster go again and again: no stream is lost."""

from __future__ import annotations

import random
import time

import pytest
from clusters import Stream, ask, wait_for

FAULTS = 20
PROMPTS = ("What is phalanx?", "Tell me about the sea.", "Why is the sky blue?")
TOKENS = 400


@pytest.mark.soak  # many, in any order and at any moment; each of them once in `test_recovery.py`
@pytest.mark.timeout(1800)
def test_no_stream_is_lost_by_faults_of_hosts(serving) -> None:
    choose = random.Random(2)
    desk = serving.rig["desk"]
    expected = {prompt: ask(desk, serving.url, prompt, TOKENS) for prompt in PROMPTS}
    for _ in range(FAULTS):
        streams = {prompt: Stream(desk, serving.url, prompt, TOKENS) for prompt in PROMPTS}
        begun = {prompt: stream.piece() for prompt, stream in streams.items()}
        assert all(begun.values())
        time.sleep(choose.uniform(0, 0.5))
        fault(serving, choose.choice(("rank of a", "rank of b", "agent of b", "link of b")))
        for prompt, stream in streams.items():
            assert (begun[prompt] or "") + stream.text() == expected[prompt]
        wait_for(lambda: serving.ready, "it serves again")


def fault(serving, what: str) -> None:
    """Bring about one fault, and mend it where nothing else does."""
    word, _, name = what.partition(" of ")
    host = serving.rig[name]
    if word == "link":
        host.cut()
        wait_for(lambda: not serving.ready, "the link is missed")
        host.mend()
        return
    for pid in host.processes(f"phalanx {word}"):
        host.run(["kill", "-KILL", str(pid)], check=False)
