"""Who the ranks of a group are to each other, and all they say on the control channel.

Plain data: identities, limits, failures, messages. Does not know sockets, clocks or threads, nor what a payload means.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from phalanx.dist.frames import frame
from phalanx.errors import ConfigError, ExitCode, FrameError

PROTOCOL = 1
"""Of the messages below; ranks with different ones do not form a group."""


class Identity(Struct, frozen=True, kw_only=True):
    """One rank process, as it names itself."""

    rank: int
    pid: int
    host: str
    version: str  # of phalanx
    mlx: str
    mlx_lm: str
    python: str
    device: str
    fingerprint: str = ""  # of the model's files; "" is not known yet

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


class Limits(Struct, frozen=True, kw_only=True):
    """How long the channel waits for what, in seconds."""

    hello_s: float = 30.0  # for all ranks to have connected
    stranger_s: float = 5.0  # for a connection to prove that it is of this group
    silence_s: float = 2.0  # without a byte from a rank while serving
    loading_silence_s: float = 60.0  # the same before: loading holds the interpreter's lock for long
    beat_s: float = 0.25  # between signs of life
    stall_grace_s: float = 2.0  # that workers give the leader to judge a stalled step first

    def __post_init__(self) -> None:
        if not 0 < 2 * self.beat_s <= min(self.silence_s, self.loading_silence_s):
            raise ConfigError(
                f"A rank that beats every {self.beat_s:g} s is not silent after {self.silence_s:g} s.",
                remedy="The silence limit must be at least twice the beat.",
            )


class PeerFailure(Struct, frozen=True, kw_only=True):
    """Why the group ends. The leader's verdict travels to every rank, so that all say the same."""

    code: ExitCode
    cause: str
    rank: int | None = None  # at fault; None when it is several, or nobody in particular
    host: str = ""
    pid: int = 0

    @classmethod
    def of(cls, who: Identity, code: ExitCode, cause: str) -> PeerFailure:
        """A failure of one rank."""
        return cls(code=code, cause=cause, rank=who.rank, host=who.host, pid=who.pid)

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank} ({self.host}, pid {self.pid}) "
        return " ".join(f"{where}{self.cause}".split())


# Messages are maps, so that a Hello of another version can still be read and its sender named. Before trust:


class Challenge(Struct, frozen=True, tag=True):
    """Leader, first: prove that you know the secret."""

    nonce: bytes


class Proof(Struct, frozen=True, tag=True):
    """Both ways: HMAC-SHA256 over both nonces and who is speaking (`handshake.py`)."""

    nonce: bytes  # the worker's own; empty from the leader, who has sent its nonce before
    mac: bytes


class Hello(Struct, frozen=True, tag=True):
    """Worker: who I am, and the group I mean."""

    identity: Identity
    protocol: int
    size: int


class Welcome(Struct, frozen=True, tag=True):
    """Leader: all ranks are here."""

    leader: Identity


class Refused(Struct, frozen=True, tag=True):
    """Leader: this group does not come about, or not with you."""

    kind: str  # name of the error class that the leader raises
    message: str
    remedy: str


# Afterwards:


class Payload(Struct, frozen=True, tag=True):
    """What the engines say to each other; opaque here."""

    data: bytes


class Heartbeat(Struct, frozen=True, tag=True):
    """A sign of life, and where the rank stands."""

    step: int = -1  # the last step that the engine thread entered
    inside: bool = False
    inside_s: float = 0.0


class Goodbye(Struct, frozen=True, tag=True):
    """The last word: orderly without a failure."""

    reason: str
    failure: PeerFailure | None = None


Message = Challenge | Proof | Hello | Welcome | Refused | Payload | Heartbeat | Goodbye

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The whole frame."""
    return frame(_encoder.encode(message))


def decode(payload: bytes) -> Message:
    """A message from a frame's payload.

    Raises:
        FrameError: the peer speaks another protocol.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise FrameError(f"The peer sent a message that is none of ours: {error}.") from error
