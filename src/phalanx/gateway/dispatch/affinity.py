"""Recognises a request's conversation: by the session that its client names, or by its prompt's prefix.

A conversation's next request repeats the bytes of the one before, up to the end of its list of messages. So the prompt
is cut into blocks of the client's bytes, and each block is identified by a hash of itself and all before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from phalanx.gateway.dispatch.dispatch_request import Affinity

BLOCK_BYTES = 256  # some 60 tokens: less than the system prompts that conversations share
MAX_BLOCKS = 1024  # 256 KiB; the rest of a prompt is ignored
SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id")
SESSION_CHARS = 256  # of a session's name; `policies.py` keeps 50,000


def affinity_of(
    owner: str, headers: Mapping[str, str], cache_key: str | None, model: str | None, prompt: Sequence[bytes]
) -> Affinity:
    """The affinity of a request. Owners never share a conversation, since servers share no cache between owners.

    Args:
        owner: of its API key; "" without keys.
        headers: their names in any case (a multidict).
        cache_key: the field `prompt_cache_key`.
        prompt: its parts in the order in which a template puts them: tools, system, messages; as JSON.
    """
    named = next((value for header in SESSION_HEADERS if (value := headers.get(header, ""))), cache_key or "")
    session = named[:SESSION_CHARS] and f"{owner} {named[:SESSION_CHARS]}"
    return Affinity(session, tuple(_blocks(owner, model or "", b"\0".join(prompt))))


def _blocks(owner: str, model: str, text: bytes) -> list[int]:
    """The hashes of whole blocks: the same in every gateway, so that all of them choose alike."""
    found = []
    name = _digest(f"{owner}\0{model}".encode())
    for at in range(0, min(len(text), BLOCK_BYTES * MAX_BLOCKS) - BLOCK_BYTES + 1, BLOCK_BYTES):
        name = _digest(name + text[at : at + BLOCK_BYTES])
        found.append(int.from_bytes(name, "big"))
    return found


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
