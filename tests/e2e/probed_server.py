"""A server in a process of its own, on the fake engine, that tells how long its event loop was held and its memory.

`python probed_server.py DIRECTORY` prints its port. `GET /probe` answers, in milliseconds, the longest time since the
last call that the loop's thread could not run: by the clock, and of that by processor time of this process, which does
not grow while the machine is busy with something else. `?trim=true` first gives back what the allocator keeps.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import time
from pathlib import Path

import psutil
from msgspec.structs import replace
from support.serving import CONFIG, fake_engine, make_tokenizer

from phalanx.http.http_exchange import Answer, Exchange, json_answer
from phalanx.http.listening import bind
from phalanx.http.router import Route
from phalanx.server.server_process import ServerProcess
from phalanx.supervision.fake_engine import replying

CONTEXT = 1 << 18
TICK_S = 0.002
C_LIBRARY = ctypes.CDLL(None)


class Forgetful(list):
    """The messages of a fake engine that nobody looks at."""

    def append(self, message: object) -> None:
        pass


class Probe:
    """Wakes up all the time and notes how late it is."""

    def __init__(self) -> None:
        self.clock_s = self.processor_s = 0.0

    async def run(self) -> None:
        while True:
            clock, processor = time.perf_counter(), time.process_time()
            await asyncio.sleep(TICK_S)
            late = time.perf_counter() - clock - TICK_S
            self.clock_s = max(self.clock_s, late)
            self.processor_s = max(self.processor_s, min(late, time.process_time() - processor))

    async def answer(self, exchange: Exchange) -> Answer:
        if "trim" in exchange.query:
            gc.collect()
            if hasattr(C_LIBRARY, "malloc_trim"):  # glibc's
                C_LIBRARY.malloc_trim(0)
        found = {"clock_ms": 1e3 * self.clock_s, "processor_ms": 1e3 * self.processor_s}
        self.clock_s = self.processor_s = 0.0
        return json_answer({**found, "rss": psutil.Process().memory_info().rss})


async def main() -> None:
    tokenizer = make_tokenizer(Path(sys.argv[1]))
    engine = fake_engine(tokenizer, replying([5]), step_s=0.005, info={"max_model_len": CONTEXT})
    engine.received = Forgetful()
    with bind("127.0.0.1", 0) as listener:
        server = ServerProcess(replace(CONFIG, max_n=16), engine, tokenizer, [listener])
        probe = Probe()
        server.app.application.router.add(Route("GET", "/probe", probe.answer))
        running = asyncio.create_task(probe.run())
        print(server.port, flush=True)
        await server.run_until_ended()
        running.cancel()


asyncio.run(main())
