"""Every error a person can see, as one tree, and the exit codes of the processes.

    PhalanxError
    +-- ConfigError            a flag, a file or a variable is wrong (names it)
    +-- ModelError
    |   +-- ModelNotFound      neither a directory nor a hub id that could be fetched
    |   +-- ModelUnsupported   the architecture cannot be served, and why
    |   +-- WeightsError       missing, surplus, truncated or mis-shaped tensors (names file and tensor)
    +-- MemoryShortage         needed, available, guard, and what to do
    +-- InvalidRequest         a client's mistake (HTTP 4xx): names the field
    |   +-- RequestTooLarge    body, prompt or n above the limit
    |   +-- UnknownModel       the model named in a request is not served here
    |   +-- InvalidApiKey      no key, or a wrong one
    |   +-- WrongMediaType     the body is not declared as JSON
    +-- ClusterError           something about hosts: ssh, processes, set-up; names the host
    |   +-- StartFailed        a cluster will not come up; the first cause
    +-- SlowClient             a stream's reader fell too far behind
    +-- QueueFull              too many requests; `retry_after` seconds
    +-- EngineError
        +-- EngineUnavailable  not ready or restarting, with the reason
        +-- HostUnreachable    a host's agent does not answer, or refuses; names host and address
        +-- Quarantined        the request was active in two engine crashes
        +-- Desync             a rank's state differs from the plan's; names step, row and field
        +-- NonFiniteLogits    a forward produced NaN or infinity; names step and row
        +-- GroupError         ranks could not form the group that was meant; names backend, rank and port
        |   +-- PeerMissing    ranks did not come by the deadline (names them), or left while the group formed
        |   +-- PeerRefused    a rank does not belong: names field, rank, host and both values
        +-- PeerLost           a rank failed while the group was at work; names rank, host and cause
        +-- PeerLate           ranks did not answer by a deadline; names them
        +-- FrameError         bytes on a socket that none of us sends
        +-- CollectiveFault    a reduction's checksum or tag is wrong on some rank; names step and layer

Every class carries a message that names what was seen and a `remedy` that says what to do. HTTP status codes are
not decided here but in one table in `server/app.py`.
"""

from __future__ import annotations

import enum


class PhalanxError(Exception):
    """Base of all errors of ours. `remedy` is one sentence a person can act on (may be empty)."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class ConfigError(PhalanxError):
    """A flag, file or environment variable is wrong; the message names it."""


class ModelError(PhalanxError):
    """Something about the model; the message names the model."""


class ModelNotFound(ModelError):
    """The model is neither a local directory nor a hub id that could be fetched."""


class ModelUnsupported(ModelError):
    """The architecture cannot be served correctly; the message says which part of it."""


class WeightsError(ModelError):
    """Missing, surplus, truncated or mis-shaped tensors; the message names file and tensor."""


class MemoryShortage(PhalanxError):
    """Loading or serving would cross the memory guard (B2)."""


class InvalidRequest(PhalanxError):
    """The client's mistake. `param` is the JSON field, `code` OpenAI's error code where one exists."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class RequestTooLarge(InvalidRequest):
    """The body is larger than the server accepts."""


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here; the message names those that are."""


class InvalidApiKey(InvalidRequest):
    """The Authorization header carries no accepted key."""


class WrongMediaType(InvalidRequest):
    """The request's Content-Type is not JSON."""


class ClusterError(PhalanxError):
    """Something went wrong on or with a host; the message names it."""


class StartFailed(ClusterError):
    """A cluster was started and cannot become healthy by itself."""


class SlowClient(PhalanxError):
    """The reader of a stream fell so far behind that its buffer is full; the request was cancelled."""


class QueueFull(PhalanxError):
    """All rows and the waiting queue are taken. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(PhalanxError):
    """Base of what can go wrong in or with the engine process."""


class EngineUnavailable(EngineError):
    """The engine is starting, restarting or stopped; the message says why."""

    def __init__(self, message: str, *, remedy: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after = retry_after


class HostUnreachable(EngineError):
    """The agent of a host does not answer or does not know us; the message names host and address."""


class Quarantined(EngineError):
    """The request was being computed in two engine crashes and is not tried again."""


class Desync(EngineError):
    """A rank's state is not the leader's (A1). The group stops."""


class NonFiniteLogits(EngineError):
    """A forward produced NaN or infinity (A6). Nothing of that step is committed."""


class GroupError(EngineError):
    """The ranks could not form the group that was meant (F1): the backend failed, or somebody else was there."""


class PeerMissing(GroupError):
    """Ranks did not come by the deadline, or one left while the group was forming; the message names them."""


class PeerRefused(GroupError):
    """A rank that proved to be of this group cannot be in it: other versions, other size, a rank taken twice."""


class PeerLost(EngineError):
    """Another rank failed, or this one. Seen only where that does not end the process at once (tests, tools)."""


class PeerLate(EngineError):
    """Ranks did not answer by a deadline; the message names them."""


class FrameError(EngineError):
    """The other end of a socket does not speak our protocol, or a message is too long for it."""


class CollectiveFault(EngineError):
    """The fabric delivered a sum that cannot be right (A6). Nothing of that step is committed."""


class ExitCode(enum.IntEnum):
    """Exit status of a rank process. Supervisors decide on restarts by these."""

    OK = 0
    CRASH = 1
    USAGE = 2
    CONFIG = 64  # a flag or the model is wrong: a restart cannot help
    MEMORY = 65  # the guard refused: a restart cannot help
    PEER_LOST = 70
    PEER_SILENT = 71
    DESYNC = 72
    NUMERIC = 73
    STALLED = 74
    GROUP = 75

    @property
    def restart_helps(self) -> bool:
        """Whether starting the same process again can end differently."""
        return self not in (ExitCode.OK, ExitCode.USAGE, ExitCode.CONFIG, ExitCode.MEMORY)


def exit_code_of(error: PhalanxError) -> ExitCode:
    """What a process of ours that ends by this error exits with; the nearest ancestor decides."""
    table = {
        ConfigError: ExitCode.CONFIG,
        ModelError: ExitCode.CONFIG,
        MemoryShortage: ExitCode.MEMORY,
        Desync: ExitCode.DESYNC,
        NonFiniteLogits: ExitCode.NUMERIC,
        CollectiveFault: ExitCode.NUMERIC,
        GroupError: ExitCode.GROUP,
        PeerRefused: ExitCode.CONFIG,
        PeerLost: ExitCode.PEER_LOST,
        PeerLate: ExitCode.STALLED,
        PhalanxError: ExitCode.CRASH,
    }
    return next(table[kind] for kind in type(error).__mro__ if kind in table)
