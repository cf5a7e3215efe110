"""Takes in the body of an HTTP request: checks media type and size, reads, decodes and parses it.

Large bodies are parsed one after the other on a thread beside the event loop. The memory of bodies that are being read
or tokenised is bounded, and shared among API keys. `body_parsing.py` parses the JSON, `validate.py` the fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from phalanx.http.body_budget import BodyLease
from phalanx.http.content_encoding import Upload, read_body
from phalanx.http.fair_quota import FairQuota
from phalanx.http.media_types import require_json
from phalanx.http.stream_records import RESUME_BYTES
from phalanx.memory import trim_heap
from phalanx.server.fields.json_fields import Readers
from phalanx.server.fields.openai_bodies import Body
from phalanx.server.requests.body_parsing import parse_body

INLINE_BYTES = 1 << 14  # a body of this size is parsed in 7 ms at worst; a thread would cost every request 0.1 ms
SMALL_BYTES = 1 << 16  # bodies up to this size are read regardless of the large ones
MAX_LARGE_BODIES = 4  # bodies of the largest size that may be in memory at once
TRIM_BYTES = 1 << 20  # of a body after which freed memory is given back to the system

B = TypeVar("B", bound=Body)
T = TypeVar("T")


class Intake:
    """Reads the bodies of one server. Used on its event loop.

    Args:
        max_bytes: of one body.
        context: tokens of the context, once known; more ids are not converted.
    """

    def __init__(self, max_bytes: int, context: Callable[[], int | None]) -> None:
        self._max_bytes = max_bytes
        self._context = context
        self._bytes = FairQuota(MAX_LARGE_BODIES * max_bytes)  # of bodies above SMALL_BYTES
        self._before = FairQuota(MAX_LARGE_BODIES * RESUME_BYTES)  # of the `Resume` before them
        self._parsing = asyncio.Lock()  # several threads would wait for the interpreter's lock before the event loop

    def memory(self, owner: str) -> BodyLease:
        """The memory of one body, at first none. A context manager that frees it at the end.

        Args:
            owner: of the request's API key; see `http/fair_quota.py`.
        """
        return _lease(self._bytes, owner)

    async def read(
        self,
        request: Upload,
        kind: type[B],
        parse: Callable[[B], T],
        memory: BodyLease | None = None,
        readers: Readers | None = None,
        body_in: Callable[[bytes], bytes] = bytes,
        n_before: int = 0,
    ) -> T:
        """The result of `parse` for the request's JSON body. `parse` may run on another thread.

        Args:
            memory: of the body, which the caller frees; None: this call frees it.
            readers: of the body's large fields; None: of OpenAI's.
            body_in: cuts off the part before the JSON body.
            n_before: bytes that come before it, at most RESUME_BYTES, and do not count as the body's.

        Raises:
            WrongMediaType: of `require_json`, or the Content-Encoding is neither gzip nor none.
            RequestTooLarge: the body is too large, by its Content-Length or while reading, as sent or decoded.
            QueueFull: other large bodies take all the memory.
            InvalidRequest: of `body_in`, `parse_body` or `parse`.
        """
        require_json(request.headers)
        own = self.memory("") if memory is None else nullcontext(memory)
        with own as taken, _lease(self._before, "") as before:
            try:
                before.grow(n_before)
                body = await read_body(request, self._max_bytes, taken, n_before=n_before)
                max_ids = self._context() or self._max_bytes
                if len(body) <= INLINE_BYTES:
                    return parse(parse_body(body_in(body), kind, max_ids, readers))
                async with self._parsing:
                    return await asyncio.to_thread(lambda: parse(parse_body(body_in(body), kind, max_ids, readers)))
            finally:
                if taken.n_bytes + before.n_bytes > TRIM_BYTES:
                    await asyncio.to_thread(trim_heap)


def _lease(budget: FairQuota, owner: str) -> BodyLease:
    n = budget.capacity
    refusal = f"Other large requests are being read; together they may have {n} bytes (by --max-body-mb)."
    return BodyLease(budget, owner, refusal, small=SMALL_BYTES)
