"""A request as dispatch sees it."""

from __future__ import annotations

from msgspec import Struct


class Affinity(Struct, frozen=True):
    """Identifies the requests of one conversation.

    Args:
        session: the name that the client gives it; "" if it gives none.
        blocks: hashes of the prompt's blocks from its beginning, each of a block and all before it.
    """

    session: str = ""
    blocks: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """One name for the conversation: the session, or else the hash of the prompt's first block."""
        return self.session or (str(self.blocks[0]) if self.blocks else "")


class DispatchRequest:
    """A request for a replica. Compared by identity.

    Args:
        owner: of its API key; "" without keys.
        model: that a replica must serve; None for any.
        give_up_at: latest time of a grant; monotonic seconds.
        rows: number of answers; each counts as a request on the replica.
    """

    __slots__ = ("affinity", "determinism_key", "give_up_at", "model", "owner", "refused", "rows", "tried")

    def __init__(
        self, owner: str, model: str | None, give_up_at: float, affinity: Affinity = Affinity(), rows: int = 1
    ) -> None:
        self.owner = owner
        self.model = model
        self.give_up_at = give_up_at
        self.affinity = affinity
        self.rows = rows
        self.tried: set[str] = set()  # replicas that have failed it
        self.refused: set[str] = set()  # replicas that cannot continue its stream
        self.determinism_key: str | None = None  # of the server that began its stream; None: it has not begun

    @property
    def is_begun(self) -> bool:
        """Whether its client has a part of the stream, so that it needs a replica that can continue."""
        return self.determinism_key is not None
