"""The rule on heads of requests: what it refuses, and that the parser takes what it lets pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http_parsing import parse

from phalanx.gateway.dispatch.replica import VIA
from phalanx.gateway.relay.attempt import request_headers
from phalanx.http.request_framing import RequestFraming
from phalanx.http.request_head import ADDED_BYTES, ADDED_LINES, MAX_BYTES, MAX_LINES, NAME, fault_of
from phalanx.http.stream_records import MIGRATION, RESUME
from phalanx.server.access import OF_PROXIES

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a"


def lines(*more: bytes) -> bytes:
    return b"\r\n".join((POST, *more))


def filled(n_bytes: int) -> bytes:
    """A right head of so many bytes."""
    return lines(b"x: " + b"x" * (n_bytes - len(lines(b"x: "))))


@pytest.mark.parametrize(
    "head",
    [
        POST,
        lines(b"content-length: 12", b"x:", b"y:  z\t", b"z: \xff\tz"),
        lines(b"Transfer-Encoding: Chunked"),
        b"GET / HTTP/1.0",
        filled(MAX_BYTES),
        lines(*[b"a: b"] * (MAX_LINES - 1)),
        lines(b"a: b" + b" " * 127 + b"c"),
        lines(b"a:" + b" " * 200 + b"b", b"b: c" + b"\t" * 200, b"c:" + b" " * 200),
    ],
)
def test_what_is_right(head):
    assert fault_of(head) == "" and takes(head)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (filled(MAX_BYTES + 1), "16,384 bytes"),
        (lines(*[b"a: b"] * MAX_LINES), "256 lines"),
        (lines(b"a: b" + b" " * 200 + b"c"), "run of blanks"),
        (POST.replace(b"/v1", b"http://a/v1"), "first line"),
        (POST.replace(b"/v1", b"/v1#x"), "first line"),
        (POST.replace(b"/v1", b"/\x01"), "first line"),
        (POST.replace(b"/v1", "/é".encode()), "first line"),
        (POST.replace(b"1.1", b"2.0"), "first line"),
        (b"OPTIONS * HTTP/1.1\r\nHost: a", "first line"),
        (POST.replace(b"POST", b"CONNECT"), "first line"),
        (POST.replace(b"POST", b"M-SEARCH"), "first line"),
        (POST.replace(b"\r\n", b"\n"), "first line"),
        (lines(b"a: b", b" c"), "NAME: VALUE"),
        (lines(b"a : b"), "NAME: VALUE"),
        (lines(b"a: b\x0bc"), "NAME: VALUE"),
        (lines(b"a: b\rc"), "NAME: VALUE"),
        (lines(b"a"), "NAME: VALUE"),
        (lines(b"host: b"), "host twice"),
        (b"GET / HTTP/1.1", "no host"),
        (lines(b"content-length: 1", b"content-length: 1"), "content-length twice"),
        (lines(b"content-length: +1"), "number of bytes"),
        (lines(b"content-length: 1, 1"), "number of bytes"),
        (lines(b"transfer-encoding: gzip, chunked"), "not chunked"),
        (lines(b"transfer-encoding: chunked\t "), "not chunked"),
        (lines(b"transfer-encoding: chunked", b"transfer-encoding: chunked"), "twice"),
        (lines(b"transfer-encoding: chunked", b"content-length: 1"), "two ways"),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked", "two ways"),
    ],
)
def test_what_is_refused_and_by_the_server_too(head, why):
    assert why in fault_of(head)
    assert not takes(head)


def test_a_gateway_leaves_room_for_what_it_adds():
    assert not fault_of(filled(MAX_BYTES - ADDED_BYTES), added=True) and fault_of(filled(MAX_BYTES), added=True)
    most = [b"a: b"] * (MAX_LINES - ADDED_LINES)
    assert not fault_of(lines(*most[1:]), added=True) and fault_of(lines(*most), added=True)


# The parser behind it --------------------------------------------------------------------------------------------


def passed(head: bytes, step: int = 1 << 20, *, added: bool = False) -> bytes:
    """What the parser gets of this head."""
    framing = RequestFraming(added=added)
    data = head + b"\r\n\r\n"
    return b"".join(framing.feed(data[at : at + step]) for at in range(0, len(data), step))


def takes(head: bytes, step: int = 1 << 20) -> bool:
    """Whether a server does: the parser refuses nothing that the rule lets pass."""
    found = parse(passed(head, step))
    assert len(found) <= 1
    return bool(found)


def sent_on(head: bytes) -> bytes | None:
    """What a gateway sends on with this head, by the rule and aiohttp's parser; None if it refuses."""
    found = parse(passed(head, added=True))
    if not found:
        return None
    message = found[0][0]
    own = {"request_id": "i" * 128, "owner": "o" * 16, "key": "k" * 300, "admin_key": "a" * 300, "pass_keys": False}
    headers = request_headers(message.headers.items(), **own)
    headers.update({MIGRATION: "a" * 300, RESUME: "1" * 12, "Content-Length": "9", "Host": "h" * 255})
    lines = [f"{name}: {value}".encode("utf-8", "surrogateescape") for name, value in headers.items()]
    first = f"{message.method} {message.url.raw_path_qs} HTTP/1.1".encode("utf-8", "surrogateescape")
    return b"\r\n".join((first, *lines))


@pytest.mark.parametrize("more", [[], [("Connection", "via")], [("Via", "1.1 nginx"), ("Connection", "Via, close")]])
def test_a_replica_sees_that_a_gateway_asks_whatever_the_client_says(more):
    headers = request_headers(
        [("Accept", "*/*"), *more], request_id="id", owner="", key=None, admin_key=None, pass_keys=True
    )
    assert headers.getall("Via")[-1] == VIA and "via" in OF_PROXIES


ODD = st.sampled_from([b" ", b"\t", b"\r", b"\n", b"\0", b"\x0b", b"\x7f", b"\xff", b":", b",", b" " * 150, b"#", b"%"])
VALUE = st.lists(st.one_of(ODD, st.binary(max_size=5), st.just(b"value")), max_size=4).map(b"".join)
NAMES = [b"host", b"Content-Length", b"transfer-encoding", b"connection", b"expect", b"upgrade", b"a b", b""]
WORDS = [b"0", b"12", b"chunked", b"gzip, chunked", b"1, 1", b"close", b"upgrade", b"h2c", b"100-continue"]
FRAMING = [
    (b"Content-Length", b"12"),
    (b"transfer-encoding", b"chunked"),
    (b"connection", b"close"),
    (b"upgrade", b"h2c"),
]
PLAIN = st.one_of(
    st.sampled_from(FRAMING), st.tuples(st.sampled_from([b"x", b"X-Y", b"cookie"]), st.text("a =\t\xe9~"))
)
MANY = [b"\r\nx: y" * 200, b"\r\nx: y" * 300, b"\r\nlong: " + b"x" * 12_000, b"\r\nlong: " + b"x" * 20_000]


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Heads that are right in most of their parts."""

    def part(right: st.SearchStrategy[bytes], odd: st.SearchStrategy[bytes]) -> bytes:
        return draw(odd if draw(st.integers(0, 19)) == 7 else right)

    method = part(st.sampled_from([b"GET", b"POST"]), st.sampled_from([b"get", b"P T", b"", b"CONNECT", b"M-SEARCH"]))
    target = part(
        st.sampled_from([b"/", b"/v1/models?a=b", b"//a", b"/a/../b?%zz"]),
        st.one_of(VALUE, st.sampled_from([b"*", b"http://a/", b"/a b", b"/\xc3\xa9", b"/#a", b"a:80"])),
    )
    version = part(st.sampled_from([b"HTTP/1.1"] * 3 + [b"HTTP/1.0"]), st.sampled_from([b"HTTP/1.2", b"HTTP/2.0", b""]))
    head = b" ".join((method, target, version)) + part(st.just(b"\r\nHost: a"), st.sampled_from([b"", b"\r\nhost:"]))
    for _ in range(draw(st.integers(0, 4))):
        name, value = draw(PLAIN)
        value = value if isinstance(value, bytes) else value.encode("latin-1")
        head += part(st.just(b"\r\n"), st.sampled_from([b"\n", b"\r", b"\r\n "]))
        head += part(st.just(name), st.sampled_from(NAMES)) + part(st.just(b": "), st.sampled_from([b":", b" : ", b""]))
        head += part(st.just(value), st.one_of(VALUE, st.sampled_from(WORDS)))
    return head + part(st.just(b""), st.sampled_from(MANY))


@given(heads(), st.integers(1, 9000))
def test_what_the_rule_lets_pass_the_parser_takes_and_what_it_refuses_the_server_refuses(head, step):
    if b"\r\n\r\n" in head + b"\r\n":
        return  # the head ends before
    assert takes(head, step) == (not fault_of(head))
    if (sent := sent_on(head)) is not None:
        assert fault_of(sent) == "" and takes(sent, step)


PADS = st.sampled_from([b"", b" ", b"\t", b" \t ", b" " * 150, b"\t " * 300])


@given(heads(), st.lists(st.tuples(PADS, PADS), min_size=1, max_size=5), st.integers(1, 9000))
def test_blanks_around_values_change_nothing_for_the_parser(head, pads, step):
    """aiohttp's parser drops them before a gateway sends the head on, and the rule sees them."""
    if b"\r\n\r\n" in head + b"\r\n":
        return  # the head ends before
    first, *rest = head.split(b"\r\n")
    padded = [first]
    for i, line in enumerate(rest):
        name, colon, value = line.partition(b":")
        before, behind = pads[i % len(pads)] if colon and NAME.fullmatch(name) else (b"", b"")
        behind = behind.replace(b"\t", b" ") if name.lower() == b"transfer-encoding" else behind
        padded.append(name + colon + before + value + behind)
    found = b"\r\n".join(padded)
    if len(found) > MAX_BYTES - ADDED_BYTES:
        return  # so many bytes in all are too many, whatever they are
    assert bool(fault_of(found)) == bool(fault_of(head))
    assert takes(found, step) == takes(head, step)
    assert sent_on(found) == sent_on(head)
