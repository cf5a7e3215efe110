"""A replica that computes nothing: it streams the same events to every request, and sleeps in between.

    python benchmarks/sleeping_replica.py [--events 100] [--first 0.0] [--pause 0.0]

Prints its URL. As a module, `replica` starts it as a process of its own, so that its work is not the measuring one's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

MODEL = "stub"
PLACES = 4000  # requests at once that it says it takes
WORD = "word "


@contextmanager
def replica(*, events: int = 100, first_s: float = 0.0, pause_s: float = 0.0) -> Iterator[str]:
    """Run one; yields its URL.

    Args:
        events: with text, per request.
        first_s: before the first of them.
        pause_s: between two; 0: each is written alone all the same.
    """
    command = [sys.executable, __file__, "--events", str(events), "--first", str(first_s), "--pause", str(pause_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--first", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    asyncio.run(serve(options.events, options.first, options.pause))
    return 0


async def serve(events: int, first_s: float, pause_s: float) -> None:
    """Serve until the process ends."""
    text = event({"index": 0, "delta": {"content": WORD}, "finish_reason": None})
    usage = {"prompt_tokens": 5, "completion_tokens": events, "total_tokens": events + 5}
    end = event({"index": 0, "delta": {}, "finish_reason": "length"}) + event(None, usage=usage) + b"data: [DONE]\n\n"
    whole = {"id": MODEL, "object": "chat.completion", "created": 1, "model": MODEL, "usage": usage}
    message = {"role": "assistant", "content": WORD * events}
    whole["choices"] = [{"index": 0, "message": message, "finish_reason": "length"}]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.json_response({"status": "ok", "requests": {"running": 0, "waiting": 0, "limit": PLACES}})
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        if not request.path.endswith("/chat/completions"):
            return web.json_response({"error": {"message": f"no {request.path} here"}}, status=404)
        if not json.loads(await request.read()).get("stream"):
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(first_s)
        for _ in range(events):
            await response.write(text)
            await asyncio.sleep(pause_s)
        await response.write(end)
        return response

    loop = asyncio.get_running_loop()
    server = await loop.create_server(web.Server(answer), "127.0.0.1", 0, backlog=PLACES)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


def event(choice: dict[str, object] | None, **more: object) -> bytes:
    """A chunk of a chat completion as an event."""
    choices = [] if choice is None else [choice]
    chunk = {"id": MODEL, "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": choices, **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


if __name__ == "__main__":
    raise SystemExit(main())
