"""The plain data of the control channel: identities of ranks, time limits, failures, messages."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from phalanx.dist.frames import frame
from phalanx.errors import ConfigError, ExitCode, FrameError

PROTOCOL = 3
"""Version of the messages below. Ranks with different versions do not form a group."""


class Identity(Struct, frozen=True, kw_only=True):
    """One rank process: its place, and the versions that all ranks must share."""

    rank: int
    pid: int
    host: str
    version: str  # of phalanx
    mlx: str
    mlx_lm: str
    python: str
    device: str
    fingerprint: str = ""  # of the model's files; "" if unknown

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


class WatchdogLimits(Struct, frozen=True, kw_only=True):
    """Time limits of the control channel, in seconds."""

    hello_s: float = 30.0  # until all ranks must have joined
    admit_s: float = 5.0  # until a new connection must have sent its Hello and got the leader's answer
    silence_s: float = 2.0  # without a byte from a rank until it counts as lost, while serving
    loading_silence_s: float = 60.0  # the same during the start: loading holds the GIL for long
    heartbeat_s: float = 0.25  # between heartbeats
    stall_grace_s: float = 2.0  # extra time that workers give the leader to report a stalled step

    def __post_init__(self) -> None:
        if not 0 < 2 * self.heartbeat_s <= min(self.silence_s, self.loading_silence_s):
            raise ConfigError(
                f"A silence limit of {self.silence_s:g} s is too short for a heartbeat every {self.heartbeat_s:g} s.",
                remedy="The limit must be at least twice that period.",
            )


class PeerFailure(Struct, frozen=True, kw_only=True):
    """Why the group ends. The leader sends its decision to every rank, so that all report the same cause."""

    code: ExitCode
    cause: str
    rank: int | None = None  # the rank at fault; None if there are several or none
    host: str = ""
    pid: int = 0

    @classmethod
    def of(cls, rank: Identity, code: ExitCode, cause: str) -> PeerFailure:
        """A failure of one rank."""
        return cls(code=code, cause=cause, rank=rank.rank, host=rank.host, pid=rank.pid)

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank} ({self.host}, pid {self.pid}) "
        return " ".join(f"{where}{self.cause}".split())


# Messages are maps, so that the leader can decode a Hello of another version and name its sender.
# During the handshake (`handshake.py`):


class Hello(Struct, frozen=True, tag="Hello"):
    """Worker to leader, first: the worker's identity, and the group that it was started for."""

    identity: Identity
    protocol: int
    size: int
    nonce: int  # of the start


class Admitted(Struct, frozen=True, tag="Admitted"):
    """Leader to worker: the worker is in the group, which is not complete yet."""


class GroupWelcome(Struct, frozen=True, tag="Welcome"):
    """Leader to workers: the group is complete."""

    leader: Identity


class Refused(Struct, frozen=True, tag="Refused"):
    """Leader to worker: the worker cannot join, or the group cannot form."""

    kind: str  # name of the error class that the leader raises
    message: str
    remedy: str


# After the handshake:


class Payload(Struct, frozen=True, tag="Payload"):
    """A message between engines, which the channel does not decode."""

    data: bytes


class Notice(Struct, frozen=True, tag="Notice"):
    """A message that a worker sends unasked, which the channel does not decode; the leader takes it at once."""

    data: bytes


class Heartbeat(Struct, frozen=True, tag="Heartbeat"):
    """Sent regularly: the rank is alive, and its engine thread is at this step."""

    step: int = -1  # the last step that the engine thread entered
    inside: bool = False  # the engine thread has not left it
    inside_s: float = 0.0  # seconds since it entered


class Goodbye(Struct, frozen=True, tag="Goodbye"):
    """The sender's last message: with a failure, or because it leaves normally."""

    reason: str
    failure: PeerFailure | None = None


Message = Hello | Admitted | GroupWelcome | Refused | Payload | Notice | Heartbeat | Goodbye

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The frame of a message."""
    return frame(_encoder.encode(message))


def decode(payload: bytes) -> Message:
    """A message from a frame's payload.

    Raises:
        FrameError: the payload is not one of these messages.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise FrameError(f"The peer sent a message that is not of this protocol: {error}.") from error
