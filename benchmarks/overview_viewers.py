"""The cost of pages that look on: decode speed of 64 streams with 0, 1 and 20 viewers of the overview, in turns.

The viewers are connections that read `/v1/overview/events`, as a page does, and draw nothing: a page draws on another
machine. Speeds differ between blocks of one kind as well; that spread is the noise. With chromium also the time
to the page's first paint, from an idle server.

    python benchmarks/overview_viewers.py [--rounds 4] [--seconds 4]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from playwright.sync_api import sync_playwright
from servers import MODEL_NAME, endless_demo, phalanx

from phalanx.http.web_page import files

STREAMS = 64
VIEWERS = (0, 1, 20)
ASKED = {"model": MODEL_NAME, "prompt": "Once", "stream": True, "max_tokens": 400, "temperature": 0}
LOADS = 5  # of the page
TOKENS = re.compile(r"^phalanx:generation_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4, help="of one block of each kind")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a block")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        flags = ("--max-num-seqs", str(STREAMS), "--memory-guard-gb", "0.2", "--kv-cache-gb", "0.5")
        with phalanx(endless_demo(Path(directory)), *flags) as url:
            paint_ms = first_paint(url.removesuffix("/v1"))
            blocks = asyncio.run(measure(url, options.rounds, options.seconds))
    found: dict[str, Any] = {"page_bytes": sum(len(answer.body) for answer in files().values())}
    if paint_ms is not None:
        found["first_paint_ms"] = paint_ms
    for n in VIEWERS:
        here = [block for block in blocks if block["viewers"] == n]
        speeds = sorted(block["tokens_per_s"] for block in here)
        found[f"viewers_{n}"] = {
            "tokens_per_s": round(statistics.median(speeds)),
            "slowest_and_fastest": [round(speeds[0]), round(speeds[-1])],
            "server_cpu_share": round(statistics.median(block["cpu_share"] for block in here), 3),
            "bytes_per_s_and_viewer": round(statistics.median(block["bytes_per_s"] for block in here) / max(1, n)),
        }
    print(json.dumps(found))
    return 0


def first_paint(origin: str) -> float | None:
    """Milliseconds from asking for the page to its first text; the median of some. None without a browser."""
    if (binary := shutil.which("chromium")) is None:
        return None
    script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        times: list[float] = []
        for _ in range(LOADS):
            page = browser.new_context().new_page()
            page.goto(origin)
            page.wait_for_function(script)
            times.append(page.evaluate(script))
            page.close()
        browser.close()
    return round(statistics.median(times))


async def measure(url: str, rounds: int, seconds: float) -> list[dict[str, float]]:
    """Blocks of each kind, there and back, while the streams go on."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        streams = [asyncio.create_task(stream(session, url)) for _ in range(STREAMS)]
        await asyncio.sleep(2 * seconds)  # graphs are captured, buffers have grown
        found = []
        for number in range(rounds):
            for n in VIEWERS if number % 2 else reversed(VIEWERS):
                found.append(await block(session, url, n, seconds))
                print(found[-1], flush=True)
        for task in streams:
            task.cancel()
        for result in await asyncio.gather(*streams, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise RuntimeError("a stream broke off") from result
    return found


async def stream(session: aiohttp.ClientSession, url: str) -> None:
    """Requests one after the other, for ever."""
    while True:
        async with session.post(f"{url}/completions", json=ASKED) as answer:
            answer.raise_for_status()
            async for _ in answer.content.iter_any():
                pass


async def block(session: aiohttp.ClientSession, url: str, n: int, seconds: float) -> dict[str, float]:
    """Tokens a second, the server's processor time and the bytes of all viewers, with n of them."""
    read = [0]

    async def look() -> None:
        async with session.get(f"{url}/overview/events") as answer:
            answer.raise_for_status()
            async for piece in answer.content.iter_any():
                read[0] += len(piece)

    viewers = [asyncio.create_task(look()) for _ in range(n)]
    await asyncio.sleep(0.5)
    async with session.get(f"{url.removesuffix('/v1')}/health") as answer:
        server = psutil.Process((await answer.json())["ranks"][0]["pid"]).parent()
    assert server is not None
    tokens, cpu_s, n_read, begun = await generated(session, url), sum(server.cpu_times()[:2]), read[0], time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - begun
    found = {
        "viewers": n,
        "tokens_per_s": (await generated(session, url) - tokens) / took,
        "cpu_share": (sum(server.cpu_times()[:2]) - cpu_s) / took,
        "bytes_per_s": (read[0] - n_read) / took,
    }
    for viewer in viewers:
        assert not viewer.done(), "a viewer was refused"
        viewer.cancel()
    await asyncio.gather(*viewers, return_exceptions=True)
    return found


async def generated(session: aiohttp.ClientSession, url: str) -> float:
    """Tokens since the server began."""
    async with session.get(f"{url.removesuffix('/v1')}/metrics") as answer:
        found = TOKENS.search(await answer.text())
    assert found is not None
    return float(found[1])


if __name__ == "__main__":
    raise SystemExit(main())
