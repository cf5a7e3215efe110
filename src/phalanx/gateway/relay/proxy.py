"""Answers requests through replicas: reads bodies, and takes the steps that `failover.py` decides. The dispatcher
decides which replica gets a request, and when.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from msgspec import Struct
from multidict import CIMultiDict

from phalanx.errors import MalformedAnswer, PhalanxError, ReplicaFailed
from phalanx.gateway.dispatch.affinity import affinity_of
from phalanx.gateway.dispatch.async_dispatcher import AsyncDispatcher
from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.replica import Replica
from phalanx.gateway.dispatch.replica_models import model_meant
from phalanx.gateway.dispatch.retries import RetryBudgets
from phalanx.gateway.relay.api_kinds import OPAQUE
from phalanx.gateway.relay.attempt import Attempt, request_headers
from phalanx.gateway.relay.body_peek import Peek, peek, prompt_tokens, tokens_of, usage_in, with_model
from phalanx.gateway.relay.exchange import ClientExchange, body_lease
from phalanx.gateway.relay.failover import RETRIED, Failover
from phalanx.gateway.relay.gateway_metrics import GatewayMetrics
from phalanx.gateway.relay.relay import FIRST_ERROR, Relay
from phalanx.gateway.relay.replica_sessions import ReplicaSessions
from phalanx.gateway.relay.request_trails import RequestTrail, RequestTrails, StreamMove, trail_of
from phalanx.gateway.relay.traffic import BufferedResponse, Traffic
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.http.content_encoding import read_body
from phalanx.http.fair_quota import FairQuota
from phalanx.http.http_exchange import Answer, Reply
from phalanx.http.media_types import is_json
from phalanx.http.stream_records import MIGRATION, RESUME, resume_body

log = logging.getLogger(__name__)

BODIES = 64  # of the largest size that fit in memory together
TICK_S = 0.25  # between two checks of attempts that wait for their replica
KEEP_ALIVE_S = 5.0  # between two keep-alives in a failover gap, as in a phalanx server's streams
WITHOUT_KEY = "the replica %s refuses its admin key: its streams cannot move, and it sees all API keys as one client"


class _Call(Struct, eq=False):
    """A request on its way to replicas."""

    exchange: ClientExchange
    failover: Failover
    trail: RequestTrail
    path: str  # with its query
    body: bytes
    n_tokens: int  # expected, of prompt and answer
    pass_keys: bool  # pass the client's own key on
    kept_at: float  # when its stream last had a replica or its client got a keep-alive
    attempt: Attempt | None = None  # under way
    queued_s: float = 0.0

    def cut(self, error: PhalanxError) -> None:
        """End the attempt under way with this error, if there is one."""
        if self.attempt is not None:
            self.attempt.cut(error)


class Proxy:
    """See the module's docstring.

    Args:
        sessions: HTTP sessions for replicas.
        check_now: checks the health of a replica at once.
    """

    def __init__(
        self,
        config: GatewayConfig,
        dispatcher: AsyncDispatcher,
        sessions: ReplicaSessions,
        metrics: GatewayMetrics,
        check_now: Callable[[Replica], None],
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._clock = dispatcher.clock
        self._sessions = sessions
        self._metrics = metrics
        self._check_now = check_now
        self._budgets = RetryBudgets(config.retry_budget)
        self._memory = FairQuota(BODIES * config.max_body_bytes)
        self._calls: set[_Call] = set()
        self.trails = RequestTrails()
        self._closed: PhalanxError | None = None
        self._closing = asyncio.Event()

    async def forward(
        self,
        exchange: ClientExchange,
        aliases: Mapping[str, str],
        *,
        pass_keys: bool,
        reserve: Callable[[int, int], None],
    ) -> Reply:
        """Answer a request through a replica.

        Args:
            aliases: alias -> model.
            reserve: takes the expected number of tokens and answers of the request; may refuse it.
            pass_keys: pass the client's own key on.

        Raises:
            PhalanxError: no replica answered; nothing was sent.
        """
        with body_lease(self._memory, exchange.quota_owner) as memory:
            body = await read_body(exchange.http, self._config.max_body_bytes, memory)
            exchange.n_read = len(body)
            call = self._call(exchange, body, aliases, pass_keys)
            failover = call.failover
            reserve(call.n_tokens, failover.request.rows)
            if self._closed is not None:
                raise self._closed
            self._calls.add(call)
            if failover.may_stream:  # it asks a model
                self.trails.add(call.trail)
            try:
                while failover.state != "done":
                    await self._step(call)
                reply = await self._end(call)
            finally:
                self._calls.discard(call)
                has_left = failover.state != "done"
                if has_left:
                    failover.client_gone(self._clock())
                    self._dispatcher.settle()
                is_error = isinstance(failover.result, PhalanxError)
                call.trail.end("client left" if has_left else "failed" if is_error else "finished", self._clock())
        self._metrics.finished(self._clock() - exchange.arrived, call.queued_s)
        return reply

    def close(self, error: PhalanxError) -> None:
        """End every request with this error, and begin no further attempt."""
        self._closed = error
        self._closing.set()
        self._dispatcher.fail_all(error)
        for call in list(self._calls):
            call.failover.gateway_end = error
            call.cut(error)

    def remove(self, replica: Replica, *, movable_only: bool) -> None:
        """End the attempts on a replica that an operator removed.

        Args:
            movable_only: only streams that can move.
        """
        for call in list(self._calls):
            traffic = call.failover.traffic
            if traffic is not None and traffic.grant.replica is replica and (traffic.can_move or not movable_only):
                call.cut(ReplicaFailed(f"The replica {replica.name} was removed."))

    async def watch(self) -> None:
        """Check running attempts, and send keep-alives in failover gaps. Runs until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            for call in list(self._calls):
                failover, traffic = call.failover, call.failover.traffic
                if traffic is not None and traffic.needs_check(now):
                    self._check_now(traffic.grant.replica)
                if (error := failover.tick(now)) is not None:
                    call.cut(error)
                if call.attempt is not None and call.attempt.is_broken:
                    call.cut(MalformedAnswer(f"The replica {call.attempt.name} broke HTTP's framing in its answer."))
                if failover.gap_since is None:
                    call.kept_at = now
                elif now - call.kept_at > KEEP_ALIVE_S:
                    call.kept_at = now
                    with suppress(ConnectionError):  # the client left, which ends the request as well
                        await call.exchange.keep_alive()

    # A request -------------------------------------------------------------------------------------------------

    def _call(self, exchange: ClientExchange, body: bytes, aliases: Mapping[str, str], pass_keys: bool) -> _Call:
        headers, url = exchange.request.headers, exchange.request.rel_url
        seen = peek(body) if body and is_json(headers) else Peek()
        model = seen.model
        if model is not None:
            meant = model_meant(model, self._dispatcher.core.replicas.values(), aliases)
            if meant != model:
                model = meant
                body = with_model(body, seen, model)
        budget = self._budgets.of(exchange.quota_owner)
        budget.note_request()
        affinity = affinity_of(exchange.owner, headers, seen.prompt_cache_key, model, seen.prompt_parts)
        now = self._clock()
        failover = Failover(
            request=DispatchRequest(exchange.owner, model, now + self._config.queue_timeout_secs, affinity, seen.rows),
            config=self._config,
            dispatcher=self._dispatcher.core,
            metrics=self._metrics,
            budget=budget,
            random=random.random,
            deadline=exchange.arrived + self._config.request_timeout_secs,
            may_stream=exchange.request.method == "POST" and exchange.dialect not in OPAQUE,
        )
        query = f"?{url.raw_query_string}" if url.raw_query_string else ""
        n_tokens = prompt_tokens(exchange.n_read) + (0 if exchange.dialect in OPAQUE else seen.answer_tokens)
        trail = trail_of(exchange, model)
        return _Call(exchange, failover, trail, exchange.raw_path + query, body, n_tokens, pass_keys, now)

    async def _step(self, call: _Call) -> None:
        """Take the step that the state names, and report the outcome."""
        failover, clock = call.failover, self._clock
        if failover.state == "sending":
            await self._attempt(call)
            self._dispatcher.settle()
        elif failover.state == "backing off":
            with suppress(TimeoutError):
                async with asyncio.timeout(failover.pause_s):
                    await self._closing.wait()  # ends the pause early
            failover.pause_over(clock())
        else:
            asked_at = clock()
            try:
                grant = await self._dispatcher.place(failover.request)
            except PhalanxError as error:
                failover.place_refused(error, clock())
            else:
                call.queued_s += clock() - asked_at
                failover.placed(grant, clock())

    async def _attempt(self, call: _Call) -> None:
        exchange, failover, traffic = call.exchange, call.failover, call.failover.traffic
        assert traffic is not None
        replica = traffic.grant.replica
        call.trail.replicas.append(replica.name)
        if not exchange.has_begun:
            exchange.n_tokens = call.n_tokens
        pass_keys = call.pass_keys and replica.spec.key is None and not replica.spec.by_api
        headers, body = self._for_replica(call, traffic, pass_keys)
        session = self._sessions.of(replica.spec, is_new=failover.met_stale)
        call.attempt = Attempt(traffic, failover.deadline)
        relay = Relay(
            exchange,
            call.attempt,
            is_clients_key=pass_keys,
            on_first_byte=lambda: self._note_first_byte(call, replica),
            on_first_text=lambda: self._note_first_text(exchange),
        )
        try:
            async with call.attempt as attempt:
                response = await attempt.send(session, exchange.request.method, call.path, headers, body)
                answer = await relay.answer(response)
        except PhalanxError as error:
            level = logging.WARNING if exchange.has_begun else logging.INFO
            log.log(level, "%s %s: an attempt on %s failed: %s", exchange.path, exchange.id, replica.name, error)
            failover.broke_off(error, self._clock())
            call.trail.gap_since = failover.gap_since
        else:
            if answer is None:
                failover.passed_on(self._clock())
                return
            if answer.status in RETRIED:
                log.info("%s: an attempt on %s failed: it answered %d", exchange.id, replica.name, answer.status)
            refused_key = replica.refused_key
            failover.answered(answer, self._clock())
            if replica.refused_key != refused_key:
                log.warning(WITHOUT_KEY, replica.name)
        finally:
            call.attempt = None

    def _for_replica(self, call: _Call, traffic: Traffic, pass_keys: bool) -> tuple[CIMultiDict[str], bytes | None]:
        """Headers and body of an attempt."""
        exchange, spec = call.exchange, traffic.grant.replica.spec
        headers = request_headers(
            exchange.request.headers.items(),
            request_id=exchange.id,
            owner=exchange.owner,
            key=spec.key,
            admin_key=traffic.admin_key,
            pass_keys=pass_keys,
        )
        if traffic.transcript is not None:
            headers[MIGRATION] = spec.admin_key or ""  # a server continues streams only with the right key
        if (resume := call.failover.resume(self._clock())) is None:
            return headers, call.body or None
        size, body = resume_body(resume, call.body)
        headers[RESUME] = str(size)
        return headers, body

    async def _end(self, call: _Call) -> Reply:
        """Send the result, or end the begun answer.

        Raises:
            PhalanxError: the result is an error and nothing was sent.
        """
        exchange, result, stream = call.exchange, call.failover.result, call.failover.stream
        if isinstance(result, BufferedResponse):
            exchange.n_tokens = 0
            if result.status < FIRST_ERROR:
                self._note_first_text(exchange)
                known = tokens_of(usage_in(result.body))  # prompt included
                exchange.n_tokens = prompt_tokens(exchange.n_read) if known is None else known
            return Answer(result.body, result.status, "", result.headers)
        if result is None:
            return await exchange.http.end()
        if exchange.http.response is None:
            raise result
        number = stream.next_number if stream is not None else 0
        await exchange.end_with(result, is_stream=stream is not None, number=number)
        return exchange.http.response

    def _note_first_byte(self, call: _Call, replica: Replica) -> None:
        now, since = self._clock(), call.failover.gap_since
        if since is not None:
            self._metrics.gap(now - since)
            arrived = call.exchange.arrived
            origin = call.failover.gap_of
            call.trail.moves.append(StreamMove(since - arrived, origin, replica.name, now - since, time.time()))
            call.trail.gap_since = None
            log.info("%s: %s continues the stream after %.2f s", call.exchange.id, replica.name, now - since)
        call.failover.first_byte(now)

    def _note_first_text(self, exchange: ClientExchange) -> None:
        exchange.first_text_s = self._clock() - exchange.arrived
        self._metrics.first_byte(exchange.first_text_s)
