"""Passes requests to replicas and their answers back: attempts, retries, streams that go on elsewhere (G2).

    read the body -> find the model -> wait for a replica -> send -> pass the answer on
                                            ^                  |
                                            +-- it failed, ----+
                                                before the first byte: the request is sent again
                                                in a begun stream: with what its client has (`http/stream_records.py`)

Which replica and when is the dispatcher's decision.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import closing

from phalanx.errors import NoReplica, PhalanxError, ReplicaFailed
from phalanx.gateway.dispatch.affinity import affinity_of
from phalanx.gateway.dispatch.async_dispatcher import AsyncDispatcher
from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.dispatcher import Grant, Verdict
from phalanx.gateway.dispatch.replica import Replica
from phalanx.gateway.dispatch.retries import Backoff, RetryBudgets
from phalanx.gateway.relay.api_kinds import OPAQUE
from phalanx.gateway.relay.attempt import Attempt, request_headers
from phalanx.gateway.relay.body_peek import Peek, peek, prompt_tokens, with_model
from phalanx.gateway.relay.exchange import ClientExchange, body_lease
from phalanx.gateway.relay.gateway_metrics import GatewayMetrics
from phalanx.gateway.relay.migration import Migration, refuses_key
from phalanx.gateway.relay.relay import FIRST_ERROR, BufferedResponse, Relay, RelayedResponse
from phalanx.gateway.relay.replica_sessions import ReplicaSessions
from phalanx.gateway.relay.upstream_request import UpstreamRequest
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.http.media_types import is_json
from phalanx.http.shares import Shares

log = logging.getLogger(__name__)

RETRIED = frozenset((408, 429, 500, 502, 503, 504))
"""Statuses of a replica that another one may not give."""
SUCCEEDED = range(200, 300)
NOT_FOUND = 404
FAILED = 500  # from here on an answer may be the replica's fault
BODIES = 64  # of the largest size that are held together
TICK_S = 0.25  # between two looks at attempts that wait for their replica
QUIET_S = 0.5  # of a stream, after which its replica is checked: most steps are shorter


class Proxy:
    """See the module's docstring.

    Args:
        sessions: the clients for replicas.
        check_now: has the health of a replica checked at once.
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
        self._check_now = check_now
        self._sessions = sessions
        self._metrics = metrics
        self._budgets = RetryBudgets(config.retry_budget)
        self._backoff = Backoff(
            initial_s=config.retry_initial_backoff_ms / 1000,
            longest_s=config.retry_max_backoff_ms / 1000,
            multiplier=config.retry_backoff_multiplier,
            jitter=config.retry_jitter_factor,
        )
        self._memory = Shares(BODIES * config.max_body_bytes)
        self._under_way: dict[Attempt, tuple[UpstreamRequest, Relay]] = {}
        self._is_closing = False

    async def forward(
        self,
        exchange: ClientExchange,
        aliases: Mapping[str, str],
        *,
        pass_keys: bool,
        reserve: Callable[[int, int], None],
    ) -> RelayedResponse:
        """Answer a request through a replica.

        Args:
            aliases: of models.
            reserve: is told how many tokens and answers the request is expected to take; may refuse it.
            pass_keys: the client's own key is for the replica.

        Raises:
            PhalanxError: there is no answer, and its first byte is not sent.
        """
        with body_lease(self._memory, exchange.share) as memory:
            body = await exchange.read_body(self._config.max_body_bytes, memory)
            out = self._upstream_request(exchange, body, aliases, pass_keys)
            reserve(out.n_tokens, out.request.rows)
            try:
                with closing(out.migration):
                    relayed = await self._attempts(exchange, out)
            finally:
                if out.successor is not None:  # the answer has ended just now, or its client left
                    self._dispatcher.end(out.successor, "abandoned")
        self._metrics.answered(relayed.response.status, self._dispatcher.clock() - exchange.arrived, out.queued_s)
        return relayed

    def close(self, error: PhalanxError) -> None:
        """End every request with this error, and begin no further attempt."""
        self._is_closing = True
        self._dispatcher.fail_all(error)
        for attempt in list(self._under_way):
            attempt.cut(error)

    def cut(self, replica: Replica, error: PhalanxError) -> None:
        """End every attempt on one replica with this error."""
        for attempt in list(self._under_way):
            if attempt.grant.replica is replica:
                attempt.cut(error)

    def move(self, replica: Replica, error: PhalanxError) -> None:
        """End the attempts on one replica whose streams can go on elsewhere, with this error."""
        for attempt, (_, relay) in list(self._under_way.items()):
            if attempt.grant.replica is replica and relay.reader is not None and relay.reader.can_go_on:
                attempt.cut(error)

    async def watch(self) -> None:
        """End attempts whose replica has fallen silent, or computes no more while another one could. Runs until
        cancelled.
        """
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            for attempt, (out, relay) in list(self._under_way.items()):
                if _needs_check(attempt, relay, now):
                    self._check_now(attempt.grant.replica)
                why = self._silence(attempt, now)
                if why or ((why := self._pause(attempt, relay, now)) and self._has_successor(attempt, out, relay)):
                    attempt.cut(ReplicaFailed(f"The replica {attempt.name} {why}."))

    def _silence(self, attempt: Attempt, now: float) -> str:
        """Why nothing more is expected of this attempt, as a predicate; empty if something is."""
        if attempt.is_relaying:
            return ""
        health = attempt.grant.replica.health
        if health.is_lost(attempt.last_byte):
            return f"is down ({health.reason})"
        limit = self._config.stream_timeout_secs
        return f"sent nothing for {limit:g} s" if attempt.has_begun and now - attempt.last_byte > limit else ""

    def _pause(self, attempt: Attempt, relay: Relay, now: float) -> str:
        """Why a replica computes nothing of this attempt though it may again, as a predicate; empty if it does."""
        health, stream = attempt.grant.replica.health, relay.reader
        if attempt.is_relaying:
            return ""
        if stream is None and health.numerics and not attempt.has_begun:  # an answer that is no stream comes as a whole
            since = health.refused_since
            return "says that it cannot serve" if since is not None and attempt.last_byte < since else ""
        if stream is None or not stream.can_go_on:
            return ""
        if stream.is_paused:
            return "has lost its engine"
        is_silent = health.silence(attempt.last_byte, now) > self._config.health_check_timeout_secs
        return "answers neither the stream nor a health check" if is_silent else ""

    def _has_successor(self, attempt: Attempt, out: UpstreamRequest, relay: Relay) -> bool:
        """Find a place elsewhere for a request whose replica computes nothing. While there is none, it stays."""
        replica = attempt.grant.replica
        if out.successor is not None or self._is_closing or not out.migration.may_leave(replica, relay.reader):
            return False
        out.successor = self._dispatcher.elsewhere(out.request, replica)
        return out.successor is not None

    # A request -------------------------------------------------------------------------------------------------

    def _upstream_request(
        self, exchange: ClientExchange, body: bytes, aliases: Mapping[str, str], pass_keys: bool
    ) -> UpstreamRequest:
        config, headers, url = self._config, exchange.request.headers, exchange.request.rel_url
        seen = peek(body) if body and is_json(headers) else Peek()
        model = seen.model
        if model is not None and model in aliases:
            model = aliases[model]
            body = with_model(body, seen, model)
        query = f"?{url.raw_query_string}" if url.raw_query_string else ""
        now = self._dispatcher.clock()
        budget = self._budgets.of(exchange.share)
        budget.note_request()
        request = DispatchRequest(
            exchange.owner,
            model,
            now + config.queue_timeout_secs,
            affinity_of(exchange.owner, headers, seen.prompt_cache_key, model, seen.prompt_parts),
            seen.rows,
        )
        return UpstreamRequest(
            request=request,
            method=exchange.request.method,
            path=exchange.raw_path + query,
            body=body or None,
            n_tokens=prompt_tokens(exchange.n_read) + (0 if exchange.dialect in OPAQUE else seen.answer_tokens),
            deadline=asyncio.get_running_loop().time() + config.request_timeout_secs - (now - exchange.arrived),
            pass_keys=pass_keys,
            migration=Migration(exchange, request, config, self._metrics, self._dispatcher.clock),
            budget=budget,
        )

    async def _attempts(self, exchange: ClientExchange, out: UpstreamRequest) -> RelayedResponse:
        """Try until an answer is sent to its end, or there is no further attempt."""
        last: BufferedResponse | PhalanxError | None = None
        while True:
            asked_at = self._dispatcher.clock()
            grant, out.successor = out.successor, None
            try:
                grant = grant or await self._dispatcher.place(out.request)
            except PhalanxError as error:
                if exchange.has_begun:
                    return await out.migration.give_up(error)
                if isinstance(error, NoReplica) and out.request.tried and await self._may_retry(out):
                    continue  # it waited for a replica that has gone; one that failed it may be back
                if isinstance(error, NoReplica) and isinstance(last, BufferedResponse):
                    return self._returned(exchange, last)
                raise
            out.queued_s += self._dispatcher.clock() - asked_at
            if not exchange.has_begun:
                exchange.n_tokens = out.n_tokens
            result = await self._attempt(exchange, out, grant)
            if isinstance(result, RelayedResponse):
                return result
            replica = grant.replica
            refused = isinstance(result, BufferedResponse) and refuses_key(replica, out.admin_key, result)
            if refused and not exchange.has_begun:
                continue
            if not replica.is_leaving:  # else an operator took it away, and its name may be a new replica's already
                out.request.tried.add(replica.name)
                out.attempts += 1
            if (
                isinstance(result, BufferedResponse)
                and not exchange.has_begun
                and not self._is_worth_retrying(out, result)
            ):
                return self._returned(exchange, result)
            log.info("%s: an attempt on %s failed: %s", exchange.id, replica.name, _said(result))
            if exchange.has_begun:
                if not await self._may_move(out, replica, result):
                    return await out.migration.give_up(result)
                continue
            if out.successor is None and not await self._may_retry(out):
                if isinstance(result, PhalanxError):
                    raise result
                return self._returned(exchange, result)
            self._metrics.retried(replica.name)
            out.request.give_up_at = self._dispatcher.clock() + self._config.queue_timeout_secs
            last = result

    async def _attempt(
        self, exchange: ClientExchange, out: UpstreamRequest, grant: Grant
    ) -> RelayedResponse | BufferedResponse | PhalanxError:
        """One attempt. Returns the answer, or the error of a replica that failed."""
        verdict: Verdict = "abandoned"  # the client left
        replica, migration = grant.replica, out.migration
        attempt = Attempt(grant, out.deadline)
        out.admin_key = replica.admin_key
        attempt.is_clients_key = out.pass_keys and replica.spec.key is None and not replica.spec.by_api
        headers = request_headers(
            exchange.request.headers.items(),
            request_id=exchange.id,
            owner=exchange.owner,
            key=replica.spec.key,
            admin_key=out.admin_key,
            pass_keys=attempt.is_clients_key,
        )
        body, transcript = migration.request(replica, headers, out.body, out.deadline)
        relay = Relay(
            exchange,
            attempt,
            migration.stream,
            transcript,
            on_first_byte=lambda: self._note_first_byte(out, replica),
            on_first_text=lambda: self._note_first_text(exchange),
        )
        self._under_way[attempt] = out, relay
        try:
            async with attempt:
                session = self._sessions.of(replica.spec, is_new=out.met_stale)
                response = await attempt.send(session, out.method, out.path, headers, body)
                result = await relay.answer(response)
            verdict = "failed" if isinstance(result, BufferedResponse) and result.status >= FAILED else "answered"
            if isinstance(result, BufferedResponse) and result.status in SUCCEEDED:
                self._blame(out)
            return result
        except PhalanxError as error:
            verdict = "failed"
            out.met_stale |= attempt.is_stale
            if attempt.is_sent or out.successor is not None:
                migration.lost(replica, error, relay.reader)
            return error
        finally:
            del self._under_way[attempt]
            self._metrics.attempted(replica.name, verdict)
            self._dispatcher.end(grant, verdict)
            if attempt.is_unreachable:
                self._dispatcher.blame(grant)
            elif verdict == "failed" and not (attempt.is_stale or attempt.was_held):
                out.unexplained.append(grant)

    def _note_first_byte(self, out: UpstreamRequest, replica: Replica) -> None:
        """The first byte of an attempt was handed to the network."""
        out.migration.first_byte(replica)
        self._blame(out)

    def _blame(self, out: UpstreamRequest) -> None:
        """A replica answers the request: so those that failed it did not because of what it is."""
        for grant in out.unexplained:
            self._dispatcher.blame(grant)
        out.unexplained.clear()

    async def _may_move(self, out: UpstreamRequest, replica: Replica, result: BufferedResponse | PhalanxError) -> bool:
        """Whether a begun stream gets another replica; waits where one that could take it is too busy."""
        if isinstance(result, BufferedResponse) and result.status not in RETRIED:
            out.migration.refused(replica, result)
        elif isinstance(result, BufferedResponse):
            await asyncio.sleep(self._backoff.pause(out.attempts, random.random))
        return not self._is_closing and out.migration.may_go_on(result)

    # Retries ---------------------------------------------------------------------------------------------------

    def _is_worth_retrying(self, out: UpstreamRequest, answer: BufferedResponse) -> bool:
        """Whether another attempt may be answered better. Called once for each answer: it counts 404s."""
        if answer.status == NOT_FOUND and out.request.model is not None:  # it serves another model than it did
            out.not_found += 1  # the second one may be the path's
            return out.not_found == 1 and self._dispatcher.core.has_untried(out.request, self._dispatcher.clock())
        return answer.status in RETRIED and not answer.is_final

    async def _may_retry(self, out: UpstreamRequest) -> bool:
        """Whether there is another attempt; waits before a replica is asked again that has failed this request."""
        now = self._dispatcher.clock()
        if (
            self._is_closing
            or out.attempts > self._config.retry_max_retries
            or out.migration.is_spent
            or not out.budget.take(now)
        ):
            return False
        is_elsewhere = self._dispatcher.core.has_untried(out.request, now)
        pause = 0.0 if is_elsewhere else self._backoff.pause(out.attempts, random.random)
        if asyncio.get_running_loop().time() + pause >= out.deadline:
            return False
        if is_elsewhere:
            return True
        await asyncio.sleep(pause)
        out.request.tried.clear()
        return True

    def _returned(self, exchange: ClientExchange, answer: BufferedResponse) -> RelayedResponse:
        if answer.fault:
            raise ReplicaFailed(answer.fault)
        if answer.status < FIRST_ERROR:
            self._note_first_text(exchange)
        exchange.n_tokens = answer.tokens(exchange.n_read)
        return RelayedResponse(exchange.whole(answer.status, answer.body, answer.headers))

    def _note_first_text(self, exchange: ClientExchange) -> None:
        exchange.first_text_s = self._dispatcher.clock() - exchange.arrived
        self._metrics.first_byte(exchange.first_text_s)


def _needs_check(attempt: Attempt, relay: Relay, now: float) -> bool:
    """Whether a stream that could go on elsewhere is quiet, and no check has begun since its last byte."""
    stream, checked_at = relay.reader, attempt.grant.replica.health.checked_at
    can_move = stream is not None and stream.can_go_on and not attempt.is_relaying
    return can_move and checked_at < attempt.last_byte < now - QUIET_S


def _said(result: BufferedResponse | PhalanxError) -> str:
    return str(result) if isinstance(result, PhalanxError) else f"it answered {result.status}"
