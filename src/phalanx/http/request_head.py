"""Checks a request's head before aiohttp's parser sees it. Server and gateway have one rule, so that replicas refuse no
head that a gateway forwards.
"""

from __future__ import annotations

import re

MAX_BYTES = 16 << 10  # of all lines; browsers behind proxies send 4 KiB
MAX_LINES = 256  # browsers behind proxies send 40
ADDED_BYTES = 2 << 10  # a gateway's own lines: a replica's name, its two keys, an id, two lengths, Via
ADDED_LINES = 8
METHODS = b"GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS"
"""aiohttp's parser accepts more, such as CONNECT, after which it takes the bytes that follow for another protocol."""
REQUEST_LINE = re.compile(b"(?:%b) " % METHODS + rb"(?P<target>[!-~]+) HTTP/1\.(?P<minor>[01])")
NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
BLANKS = re.compile(rb"[ \t]{128}")  # regular expressions of other programs on the way take quadratic time on a run
LENGTH = re.compile(rb"[0-9]{1,18}")
SINGLE = (b"host", b"content-length", b"transfer-encoding")


def fault_of(head: bytes, *, added: bool = False) -> str:
    """What is wrong with a head; empty if nothing is.

    Args:
        head: its lines, each but the last with its CRLF.
        added: a gateway adds its own lines before it forwards the head.
    """
    if len(head) > MAX_BYTES - added * ADDED_BYTES:
        return f"its head has more than {MAX_BYTES - added * ADDED_BYTES:,} bytes"
    first, *lines = head.split(b"\r\n")
    if len(lines) > MAX_LINES - added * ADDED_LINES:
        return f"its head has more than {MAX_LINES - added * ADDED_LINES} lines"
    asked = REQUEST_LINE.fullmatch(first)
    if asked is None or not asked["target"].startswith(b"/") or b"#" in asked["target"]:
        return "its first line is not METHOD /PATH HTTP/1.1"
    found: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or NAME.fullmatch(name) is None or CONTROL.search(value):
            return "a line of its head is not NAME: VALUE"
        name, value = name.lower(), value.strip(b" \t")  # blanks around a value do not count (RFC 9110, 5.5)
        if BLANKS.search(value):
            return "its head has a long run of blanks"
        if name in SINGLE and name in found:
            return f"its head has {name.decode()} twice"
        if name == b"transfer-encoding" and line.rstrip(b" ").endswith(b"\t"):  # llhttp refuses a tab there
            return "its transfer-encoding is not chunked"
        found[name] = value
    return _framing_fault(found, is_old=asked["minor"] == b"0")


def _framing_fault(found: dict[bytes, bytes], *, is_old: bool) -> str:
    """What is wrong with the host and the length of the body.

    Args:
        found: the headers; names in lower case.
        is_old: the request is HTTP/1.0.
    """
    length, coding = found.get(b"content-length"), found.get(b"transfer-encoding")
    if b"host" not in found and not is_old:
        return "its head has no host"
    if length is not None and LENGTH.fullmatch(length) is None:
        return "its content-length is not a number of bytes"
    if coding is None:
        return ""
    if coding.lower() != b"chunked":
        return "its transfer-encoding is not chunked"
    return "the length of its body is given in two ways" if length is not None or is_old else ""
