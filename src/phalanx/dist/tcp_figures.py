"""The kernel's figures of a TCP connection: its round trip, and segments sent again. Linux only; elsewhere none."""

from __future__ import annotations

import socket
import struct
import sys

from msgspec.structs import replace

from phalanx.types import LinkStats

_FIELDS = struct.Struct("<100x I 44x I 4x I")  # Linux's `struct tcp_info`: total_retrans, min_rtt, data_segs_out
_UNKNOWN = 0xFFFFFFFF  # nothing was acknowledged yet


def with_tcp_figures(stats: LinkStats, connected: socket.socket) -> LinkStats:
    """A connection's figures with those of the kernel, if it has any: not of Unix sockets and closed ones."""
    if sys.platform != "linux" or connected.family == socket.AF_UNIX:
        return stats
    try:
        data = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _FIELDS.size)
    except OSError:
        return stats
    if len(data) < _FIELDS.size:
        return stats
    resent, round_trip_us, segments = _FIELDS.unpack(data)
    known = None if round_trip_us == _UNKNOWN else round_trip_us
    return replace(stats, round_trip_us=known, segments=segments, resent=resent)
