"""A wire that takes its time: frames that arrive at one of two interfaces leave at the other some milliseconds later.

For kernels without netem. Knows neither addresses nor connections, so that every port is delayed.

    python relay.py INTERFACE INTERFACE MILLISECONDS
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque

ETH_P_ALL = 0x0003
SOL_PACKET, PACKET_VNET_HDR = 263, 15
PACKET_OUTGOING = 4
LARGEST = 1 << 17  # bytes; the kernel hands over up to 64 KB at once, and a header


def wire(interface: str) -> socket.socket:
    """All frames of an interface, with the kernel's notes on checksums and segments that are still to be made."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
    opened.bind((interface, ETH_P_ALL))
    return opened


def relay(one: socket.socket, other: socket.socket, delay_s: float) -> None:
    """Until this process is killed."""
    far = {one: other, other: one}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()  # when, where, what: in order, since all wait alike
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for near in select.select(list(far), [], [], pause)[0]:
            frame, address = near.recvfrom(LARGEST)
            if address[2] != PACKET_OUTGOING:
                waiting.append((time.monotonic() + delay_s, far[near], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, near, frame = waiting.popleft()
            near.send(frame)


if __name__ == "__main__":
    ends = wire(sys.argv[1]), wire(sys.argv[2])
    print("ready", flush=True)
    relay(*ends, float(sys.argv[3]) / 1000)
