"""aiohttp's parser by itself, with the limits that our connections give it; and requests that it must not get."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import HttpRequestParser

from phalanx.http.request_framing import FRAMING_BYTES
from phalanx.http.request_head import MAX_BYTES, MAX_LINES

POST = b"POST /v1/none HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
ONE_BYTE = b"1\r\na\r\n"  # a chunk: five bytes of framing
REFUSED = {
    "spaces": POST + b"a:" + b" " * 10_000 + b"\0\r\n\r\n",
    "a thousand blanks": POST + b"a: b" + b" " * 1000 + b"c\r\n\r\n",
    "folded": POST + b"a: b\r\n" + b" \r\n" * 10 + b"\r\n",
    "bare line ends": POST.replace(b"\r", b"") + b"\n",
    "lines": POST + b"a:\r\n" * MAX_LINES + b"\r\n",
    "long": POST + b"a: " + b"b" * 800_000 + b"\r\n\r\n",
    "without end": POST + b"a: " + b"b" * MAX_BYTES,
    "an absolute target": POST.replace(b"/v1", b"http://b/v1") + b"\r\n",
    "CONNECT": POST.replace(b"POST /v1/none", b"CONNECT a:80") + b"\r\n",
    "CONNECT to a path": POST.replace(b"POST", b"CONNECT") + b"\r\n",
    "gzip, chunked": CHUNKED.replace(b"chunked", b"gzip, chunked"),
    "two lengths": POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "chunked 1.0": CHUNKED.replace(b"1.1", b"1.0"),
    "spaces in a trailer": CHUNKED + b"0\r\na:" + b" " * 10_000 + b"\0\r\n\r\n",
    "trailer": CHUNKED + b"1\r\na\r\n0\r\na: b\r\n\r\n",
    "extension": CHUNKED + b"1;a=b\r\na\r\n0\r\n\r\n",
    "long extension": CHUNKED + b"1;" + b" " * 10_000 + b"\n\r\n",
    "extension of the end": CHUNKED + b"1\r\na\r\n0;b\r\n\r\n",
    "no size": CHUNKED + b"\r\n",
    "a negative size": CHUNKED + b"-1\r\na\r\n",
    "a size beyond all": CHUNKED + b"f" * 16 + b"\r\na\r\n",
    "a chunk that is longer": CHUNKED + b"1\r\nab\r\n",
    "chunks": CHUNKED + ONE_BYTE * (FRAMING_BYTES // len(ONE_BYTE) + 1000),
}
"""What is expensive, or may be read in two ways: no server and no gateway takes it."""


@cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def parse(data: bytes) -> list[tuple[Any, Any]]:
    """The requests in this data: (head, reader of the body).

    Raises:
        HttpProcessingError: the parser refuses it.
    """
    limits = {"max_line_size": MAX_BYTES, "max_field_size": MAX_BYTES, "max_headers": MAX_LINES}
    parser = HttpRequestParser(BaseProtocol(loop()), loop(), 1 << 20, **limits, auto_decompress=False)
    messages, upgraded, _ = parser.feed_data(data)
    assert not upgraded
    return list(messages)


def parsed(data: bytes) -> list[bytes]:
    """The bodies of the requests in this data, each of which is whole."""
    found = parse(data)
    assert all(body.is_eof() for _, body in found)
    return [body.read_nowait() for _, body in found]
