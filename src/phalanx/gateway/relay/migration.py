"""One request's stream that goes on at another replica: what that gets, whether it may, and how its client is kept.

    its replica breaks off -> `lost` -> `may_go_on` -> another one -> `request` -> `first_byte`
                                            |
                                            +-- no -> `give_up`

The proxy's loop of attempts calls these. `http/stream_records.py` has what is said to replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from multidict import CIMultiDict

from phalanx.errors import MalformedAnswer, PhalanxError, ReplicaFailed
from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.replica import Replica
from phalanx.gateway.relay.api_kinds import OPAQUE
from phalanx.gateway.relay.event_reader import EventReader
from phalanx.gateway.relay.exchange import ClientExchange
from phalanx.gateway.relay.gap import Gap
from phalanx.gateway.relay.gateway_metrics import GatewayMetrics
from phalanx.gateway.relay.relay import BufferedResponse, RelayedResponse, relayed
from phalanx.gateway.relay.transcript import Transcript
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.http.owners import OWNER
from phalanx.http.stream_records import MIGRATION, RESUME, resume_body

log = logging.getLogger(__name__)

FORBIDDEN = 403
LEAST_S = 0.01  # of a request's time, told to a replica
REASON_BYTES = 300  # of an answer that refuses a stream, told to the client


class Migration:
    """See the module's docstring.

    Args:
        request: the client's, as dispatch sees it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        exchange: ClientExchange,
        request: DispatchRequest,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._exchange = exchange
        self._request = request
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._gap = Gap(exchange, metrics)
        self._breaks = 0
        self._moves = 0  # replicas that the begun stream has lost
        self._losses: list[str] = []  # how it lost each, and which did not take it
        self.stream: EventReader | None = None
        """Of the answer, if that is a stream of which the client has a part."""

    @property
    def is_spent(self) -> bool:
        """So many replicas have broken off under this request that perhaps it is what breaks them."""
        return self._breaks > self._config.most_breaks

    def request(
        self, replica: Replica, headers: CIMultiDict[str], body: bytes | None, deadline: float
    ) -> tuple[bytes | None, Transcript | None]:
        """The body for this replica, and where its records go; None if it is asked for none. Adds to the headers.

        Args:
            deadline: of the request; the loop's time.
        """
        key = replica.spec.admin_key or ""  # without one, or with a wrong one, nothing begun is continued
        if self.stream is not None:
            assert self.stream.transcript is not None, "a stream without records goes nowhere else"
            resume = self.stream.transcript.resume(
                next_number=self.stream.next_number,
                timeout_s=max(LEAST_S, deadline - asyncio.get_running_loop().time()),
                moves=self._moves,
            )
            size, whole = resume_body(resume, body or b"")
            headers[MIGRATION], headers[RESUME] = key, str(size)
            return whole, self.stream.transcript
        is_stream = self._exchange.request.method == "POST" and self._exchange.dialect not in OPAQUE  # it may be one
        if not (is_stream and replica.can_migrate and self._config.migration_limit):
            return body, None
        headers[MIGRATION] = key
        return body, Transcript(self._config.migration_max_seq_len)

    def first_byte(self, replica: Replica) -> None:
        """The first byte of an attempt was handed to the network."""
        if self._gap.is_open:
            seconds = self._gap.close("continued")
            log.info("%s: the stream goes on at %s after %.2f s", self._exchange.id, replica.name, seconds)

    def may_leave(self, replica: Replica, stream: EventReader | None) -> bool:
        """Whether the request may go on elsewhere though its replica lives. Not where a further break would be one too
        many: rather it waits, for a phalanx server knows itself when a request is what ends its engine.

        Args:
            stream: that the replica writes, if it does.
        """
        if self._breaks >= self._config.most_breaks:
            return False
        if stream is not None and stream.transcript is not None:
            self._note_begun(replica, stream.transcript)
        return True

    def lost(self, replica: Replica, error: PhalanxError, stream: EventReader | None) -> None:
        """A replica broke off after the request was sent. One that was taken away did not because of the request.

        Args:
            stream: that it wrote, if it did.
        """
        exchange, request = self._exchange, self._request
        self._breaks += not replica.is_leaving
        if not exchange.has_begun:
            return
        self.stream = stream
        if stream is not None and stream.ended:
            return
        self._metrics.broken(replica.name)
        log.warning("%s %s (%s): %s", exchange.request.method, exchange.path, exchange.id, error)
        self._losses.append(str(error))
        if stream is None or stream.transcript is None or not stream.can_go_on:
            return  # `may_go_on` says so too
        self._moves += 1
        self._gap.open(replica.name)
        request.give_up_at = self._clock() + self._config.queue_timeout_secs
        self._note_begun(replica, stream.transcript)

    def refused(self, replica: Replica, answer: BufferedResponse) -> None:
        """A replica does not continue the stream, and another time it would not either."""
        self._request.refused.add(replica.name)
        said = " ".join(answer.body[:REASON_BYTES].decode("utf-8", "replace").split())
        self._losses.append(f"The replica {replica.name} does not continue it: {answer.status} {said}")

    def may_go_on(self, result: BufferedResponse | PhalanxError) -> bool:
        """Whether the begun stream gets another replica after this result of an attempt."""
        is_lost = isinstance(result, (BufferedResponse, ReplicaFailed, MalformedAnswer))  # else ended, or out of time
        return (
            is_lost
            and self.stream is not None
            and self.stream.can_go_on
            and not self.is_spent
            and self._clock() < self._request.give_up_at
        )

    async def give_up(self, why: BufferedResponse | PhalanxError) -> RelayedResponse:
        """End the begun answer."""
        self.close("failed")
        stream, exchange = self.stream, self._exchange
        if stream is not None and stream.ended:
            await exchange.end()
            return relayed(exchange, None)
        error = self._error(why)
        number = stream.next_number if stream is not None else 0
        await exchange.end_with(error, is_stream=stream is not None, number=number)
        return relayed(exchange, error)

    def close(self, outcome: str = "abandoned") -> None:
        """The request is over, or its client left."""
        self._gap.close(outcome)

    def _note_begun(self, replica: Replica, transcript: Transcript) -> None:
        """The request needs a replica that can continue what this one has begun."""
        self._request.numerics = transcript.numerics
        if self._request.model is None and replica.models:
            self._request.model = min(replica.models)  # the request names none; another could not go on with its tokens

    def _error(self, why: BufferedResponse | PhalanxError) -> PhalanxError:
        """What the client is told: how the stream lost each replica, and why there is no further one."""
        said = list(self._losses)
        if isinstance(why, PhalanxError) and str(why) not in said:
            said.append(str(why))
        if self.is_spent and self.stream is not None and self.stream.can_go_on:
            said.append(f"It goes nowhere else: perhaps it breaks them (--migration-limit {self._config.most_breaks}).")
        if isinstance(why, PhalanxError) and len(said) == 1:
            return why
        return ReplicaFailed(" ".join(said))


def refuses_key(replica: Replica, key: str | None, answer: BufferedResponse) -> bool:
    """Whether a replica did not take the admin key; if so, it gets its requests without, from now on.

    Args:
        key: with which the request was made. Others made with it may be refused at the same time.
    """
    said = answer.body.lower()
    if key is None or answer.status != FORBIDDEN or not any(name.encode() in said for name in (MIGRATION, OWNER)):
        return False
    if replica.refused_key != key:
        replica.refused_key = key
        log.warning(
            "the replica %s does not take its admin key: its streams end with it, and all API keys are one to it",
            replica.name,
        )
    return True
