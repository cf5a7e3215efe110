"""All errors of phalanx, a class before those below it, and the exit codes of its processes.

Every error has a message that names the cause and a `remedy` that says what to do. HTTP status codes are in
`http/error_responses.py`.
"""

from __future__ import annotations

import enum


class PhalanxError(Exception):
    """Base of all errors of phalanx. `remedy` is a sentence that tells the user what to do; may be empty."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class ConfigError(PhalanxError):
    """A flag, file or environment variable is wrong; the message names it."""


class ModelError(PhalanxError):
    """The model cannot be used; the message names it."""


class ModelNotFound(ModelError):
    """The model is neither a local directory nor a hub id that could be downloaded."""


class ModelUnsupported(ModelError):
    """The architecture cannot be served correctly; the message says why."""


class WeightsError(ModelError):
    """Missing, surplus, truncated or mis-shaped tensors; the message names file and tensor."""


class MemoryShortage(PhalanxError):
    """Loading or serving would cross the memory guard; the message has the needed, available and guarded memory."""


class InvalidRequest(PhalanxError):
    """A mistake of the client (HTTP 4xx). `param` is the JSON field; `code` is OpenAI's error code, if there is one."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class RequestTooLarge(InvalidRequest):
    """The body is larger than the server accepts."""


class UnknownModel(InvalidRequest):
    """The request names a model that this server does not serve; the message names those that it serves."""


class UnknownPath(InvalidRequest):
    """The request's path does not exist."""


class WrongMethod(InvalidRequest):
    """The request's path takes other methods; `allowed` has them."""

    def __init__(self, message: str, *, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.allowed = allowed


class InvalidApiKey(InvalidRequest):
    """The request has no key, or a wrong one."""


class WrongMediaType(InvalidRequest):
    """The request's Content-Type is not JSON."""


class ForbiddenHost(InvalidRequest):
    """The request's Host header has a name that is not this server's."""


class AdminKeyRefused(InvalidRequest):
    """No admin key, or a wrong one, with a header that only a gateway may send."""


class GrammarRefused(InvalidRequest):
    """A schema, expression or grammar cannot be compiled within limits; the message says why, in llguidance's words."""


class ClusterError(PhalanxError):
    """A host cannot be reached, or an operation on it failed; the message names the host."""


class StartFailed(ClusterError):
    """A cluster was started, but cannot become healthy without the user; the message names the first cause."""


class SlowClient(PhalanxError):
    """A client read its stream so slowly that its output queue is full; the request was cancelled."""


class QueueFull(PhalanxError):
    """All rows and all places of the waiting queue are taken. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(QueueFull):
    """An API key has used up what it may have in a minute, or at once; the message says which limit."""


class ReplicaError(PhalanxError):
    """Base of the errors of a gateway's replicas."""


class NoReplica(ReplicaError):
    """No replica can take the request; the message names each with its reason. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ReplicaFailed(ReplicaError):
    """A replica failed while it answered a request; the message names it."""


class ReplicaTooSlow(ReplicaError):
    """The time of a request ended before its answer did; the message names the replica, if it had one."""


class MalformedAnswer(ReplicaError):
    """A replica's answer is not what its protocol says; the message says what is wrong with it."""


class EngineError(PhalanxError):
    """Base of the errors in or about the engine."""


class EngineUnavailable(EngineError):
    """The engine is starting, restarting or stopped; the message says why."""

    def __init__(self, message: str, *, remedy: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after = retry_after


class HostUnreachable(EngineError):
    """The agent of a host does not answer, or refuses this server; the message names host and address."""


class Quarantined(EngineError):
    """The request was the only one that was computed during two engine crashes, so it is not tried again."""


class Desync(EngineError):
    """A rank's state is not the plan's; the message names step, row and field. The group stops."""


class NonFiniteLogits(EngineError):
    """A forward produced NaN or infinity; the message names step and row. Nothing of that step is committed."""


class GroupError(EngineError):
    """The ranks could not form the intended group: the backend failed, or another job uses the port. The message
    names backend, rank and port."""


class PeerMissing(GroupError):
    """Ranks did not join before the deadline, or disconnected while the group formed; the message names them."""


class PeerRefused(GroupError):
    """An authenticated rank cannot be in the group: other versions, another size, or a rank number that is taken. The
    message names field, rank, host and both values."""


class PeerLost(EngineError):
    """This rank or another one failed after the group formed; the message names rank, host and cause. Raised only if
    that does not end the process at once (in tests and tools)."""


class PeerLate(EngineError):
    """Ranks did not answer before a deadline; the message names them."""


class FrameError(EngineError):
    """The other end of a socket does not speak phalanx's protocol, or a message is too long."""


class StageLinkError(EngineError):
    """Base of the faults of links between pipeline stages; the message names the link and the frame. Nothing of
    that step is committed."""


class FrameCorrupted(StageLinkError):
    """A frame's checksum is wrong: a bit changed in transit."""


class FrameLost(StageLinkError):
    """A frame did not come, but a later one did."""


class FrameRepeated(StageLinkError):
    """A frame came that had been here before."""


class FrameMismatch(StageLinkError):
    """A frame came that the plan does not ask for, or with another dtype or shape."""


class FrameLate(StageLinkError):
    """A frame did not come in time."""


class CollectiveFault(EngineError):
    """An all-reduce returned a wrong sum; the message names step and layer. Nothing of that step is committed."""


class StoreError(EngineError):
    """A block of a prefix on disk is missing or damaged. Its prefix is computed instead."""


class ExitCode(enum.IntEnum):
    """Exit status of a rank process, by which supervisors decide whether to restart it."""

    OK = 0
    CRASH = 1
    USAGE = 2
    CONFIG = 64  # a flag or the model is wrong: a restart cannot help
    MEMORY = 65  # the memory guard refused: a restart cannot help
    PEER_LOST = 70
    PEER_SILENT = 71
    DESYNC = 72
    NUMERIC = 73
    STALLED = 74
    GROUP = 75

    @property
    def restart_helps(self) -> bool:
        """Whether a restart of the same process can end differently."""
        return self not in (ExitCode.OK, ExitCode.USAGE, ExitCode.CONFIG, ExitCode.MEMORY)


def exit_code_of(error: PhalanxError) -> ExitCode:
    """The exit code of a process that this error ends: that of the error's nearest ancestor in the table."""
    table = {
        ConfigError: ExitCode.CONFIG,
        ModelError: ExitCode.CONFIG,
        MemoryShortage: ExitCode.MEMORY,
        Desync: ExitCode.DESYNC,
        NonFiniteLogits: ExitCode.NUMERIC,
        CollectiveFault: ExitCode.NUMERIC,
        StageLinkError: ExitCode.DESYNC,
        FrameCorrupted: ExitCode.NUMERIC,
        FrameLate: ExitCode.STALLED,
        GroupError: ExitCode.GROUP,
        PeerRefused: ExitCode.CONFIG,
        PeerLost: ExitCode.PEER_LOST,
        PeerLate: ExitCode.STALLED,
        PhalanxError: ExitCode.CRASH,
    }
    return next(table[kind] for kind in type(error).__mro__ if kind in table)
