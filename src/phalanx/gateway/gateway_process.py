"""The gateway's process: builds the parts, serves, reloads changed files, and drains on shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import signal
import socket
import ssl
import time
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError, ExitCode, NoReplica
from phalanx.gateway.admin import Admin
from phalanx.gateway.dispatch.async_dispatcher import AsyncDispatcher
from phalanx.gateway.dispatch.dispatcher import Dispatcher
from phalanx.gateway.dispatch.fleet import Fleet
from phalanx.gateway.dispatch.policies import CacheAware, ConsistentHashing, LeastLoad, Policy, PowerOfTwo, RoundRobin
from phalanx.gateway.dispatch.replica import Replica
from phalanx.gateway.dispatch.replica_models import parse_aliases
from phalanx.gateway.gateway_app import App
from phalanx.gateway.gateway_overview import GatewayOverview
from phalanx.gateway.relay.gateway_metrics import GatewayMetrics
from phalanx.gateway.relay.proxy import Proxy
from phalanx.gateway.relay.replica_sessions import ReplicaSessions
from phalanx.gateway.settings.clients import Clients
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.gateway.settings.keys_file import parse_keys
from phalanx.gateway.settings.replicas_file import DefaultKeys, ReplicaSpec, parse_replicas, specs_of_urls
from phalanx.gateway.settings.watched_file import WatchedFile
from phalanx.http.acceptor import FLUSH_S
from phalanx.http.allowed_hosts import AllowedHosts
from phalanx.http.connection_table import ConnectionLimits, Deadlines, limits_for
from phalanx.http.listening import base_url, bind, server_context
from phalanx.http.service import HttpService, handling
from phalanx.open_files import raise_limit

log = logging.getLogger(__name__)

OPEN_FILES = 4096  # besides one for each client's connection: one for each request on a replica
METRICS_LIMITS = ConnectionLimits(64, 32)  # of --prometheus-port: some Prometheus servers, and people
FILE_CHECK_S = 1.0  # between checks of the files of replicas and keys
CLOSING = "The gateway is shutting down."
WITHOUT_ADMIN_KEY = (
    "no admin key for %s: streams end with a replica that fails%s. If they are phalanx servers, start them with "
    "--admin-key, and the gateway with --worker-admin-key, PHALANX_WORKER_ADMIN_KEY or admin_key in --replicas FILE"
)
ONE_OWNER = (
    ", and there all API keys are one client: one key finds another's prompts in cached_tokens, and can delay it"
)


def serve(config: GatewayConfig) -> int:
    """Serve until a signal. Returns the exit code.

    Raises:
        ConfigError: a flag or a file is wrong, or the address cannot be bound; says which and what to do.
    """
    server_context(config.ssl_certfile, config.ssl_keyfile)  # raises before anything starts
    if (urls := bool(specs_of_urls(config.worker_urls))) == bool(config.replicas):
        if urls:
            raise ConfigError("--worker-urls and --replicas both name the replicas.", remedy="Leave one of them out.")
        raise ConfigError(
            "The gateway has no replicas: neither --worker-urls nor --replicas names one.",
            remedy="For example --worker-urls http://10.0.0.5:8000,http://10.0.0.6:8000, or --replicas FILE; "
            "`phalanx up HOSTFILE --replicas N -- MODEL` starts servers and a gateway.",
        )
    limits = limits_for(config.max_connections, config.max_connections_per_address, config.queue_size)
    raise_limit(limits.total + OPEN_FILES)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(config.host, config.port))
        metrics = None
        if config.prometheus_port is not None:
            metrics = stack.enter_context(bind(config.host, config.prometheus_port))
        gateway = Gateway(config, listener, metrics)
        gc.freeze()  # else a collection scans every imported module, which stalls all streams for 40 ms
        return asyncio.run(gateway.run())


def make_policy(config: GatewayConfig) -> Policy:
    """The policy that the settings name."""
    if config.policy == "cache_aware":
        return CacheAware(
            threshold=config.cache_threshold, more=config.balance_abs_threshold, times=config.balance_rel_threshold
        )
    if config.policy == "power_of_two":
        return PowerOfTwo(random.randrange)
    kinds: dict[str, type[Policy]] = {
        "least_load": LeastLoad, "round_robin": RoundRobin, "consistent_hashing": ConsistentHashing
    }  # fmt: skip
    return kinds[config.policy]()


class Gateway:
    """See the module's docstring.

    Args:
        listener: bound, listening, not blocking.
        metrics_listener: the same, for --prometheus-port.
        deadlines: how long clients may keep a connection waiting.
    """

    def __init__(
        self,
        config: GatewayConfig,
        listener: socket.socket,
        metrics_listener: socket.socket | None = None,
        deadlines: Deadlines = Deadlines(),
    ) -> None:
        self._config = config
        self._listener = listener
        self._metrics_listener = metrics_listener
        self._deadlines = deadlines
        self._clients = Clients(config.api_key, time.monotonic)
        self._dispatcher = AsyncDispatcher(
            Dispatcher(make_policy(config), queue_size=config.queue_size), time.monotonic
        )
        self._metrics = GatewayMetrics(self._dispatcher.core)
        self._stopping = asyncio.Event()
        self._stopping_at_once = asyncio.Event()
        self._files: list[WatchedFile[Any]] = []
        self._draining: set[asyncio.Task[None]] = set()
        self._worker_keys = DefaultKeys(config.worker_key, config.worker_admin_key)
        self.port = int(listener.getsockname()[1])
        self.ready = asyncio.Event()
        """The gateway accepts connections."""
        self._exit_code = ExitCode.OK

    async def run(self) -> int:
        """Serve until `stop`. Returns the exit code: CRASH if a task in the background failed.

        Raises:
            ConfigError: a file is wrong; names it and the line.
        """
        config = self._config
        aliases = parse_aliases(config.model_aliases)
        trusted = _trusted(config.worker_ca)
        async with ReplicaSessions(trusted) as sessions:
            fleet = Fleet(config, self._dispatcher, sessions.of, self._note_failure)
            proxy = Proxy(config, self._dispatcher, sessions, self._metrics, fleet.check_now)
            admin = Admin(self._dispatcher, fleet, proxy, from_file=config.replicas)
            overview = GatewayOverview(
                self._dispatcher, self._clients, fleet, proxy.trails, sessions,
                admin_key=config.admin_key, policy=config.policy,
            )  # fmt: skip
            app = App(
                self._dispatcher, proxy, self._clients, self._metrics, admin, fleet, overview,
                admin_key=config.admin_key, aliases=aliases, hosts=AllowedHosts(config.host, config.allowed_hosts),
                serves_metrics=self._metrics_listener is None, metrics_open=config.metrics_open,
            )  # fmt: skip
            tasks: list[asyncio.Task[None]] = []
            try:
                self._load_files(fleet, proxy)
                self._warn_of_missing_admin_keys(fleet)
                tasks += [
                    asyncio.create_task(work) for work in (self._dispatcher.tick(), proxy.watch(), self._watch_files())
                ]
                for task in tasks:
                    task.add_done_callback(self._note_failure)
                with handling({signal.SIGINT: self.stop, signal.SIGTERM: self.stop, signal.SIGHUP: self.reload}):
                    await self._serve(app, proxy, fleet)
            finally:
                tasks += self._draining
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await fleet.close()
        return self._exit_code

    def stop(self) -> None:
        """Refuse new requests, wait for running ones, then end. A second call ends at once."""
        if self._stopping.is_set():
            self._stopping_at_once.set()
        self._stopping.set()

    def reload(self) -> None:
        """Read the files again."""
        for file in self._files:
            file.reload(if_changed=False)

    # -----------------------------------------------------------------------------------------------------------

    def _load_files(self, fleet: Fleet, proxy: Proxy) -> None:
        config = self._config
        if config.keys is not None:
            self._files.append(WatchedFile(Path(config.keys), "--keys", parse_keys, self._clients.set_named))
        if config.replicas is not None:

            def parse(text: str, name: str) -> tuple[ReplicaSpec, ...]:
                return parse_replicas(text, name, keys=self._worker_keys)

            def apply(specs: tuple[ReplicaSpec, ...]) -> None:
                for replica in fleet.apply(specs):
                    task = asyncio.create_task(self._hand_over(proxy, replica))
                    self._draining.add(task)
                    task.add_done_callback(self._draining.discard)
                    task.add_done_callback(self._note_failure)

            self._files.append(WatchedFile(Path(config.replicas), "--replicas", parse, apply))
        else:
            fleet.apply(specs_of_urls(config.worker_urls, keys=self._worker_keys))
        for file in self._files:
            file.load()

    def _warn_of_missing_admin_keys(self, fleet: Fleet) -> None:
        """Log in one line what replicas without an admin key cannot do."""
        names = [name for name, replica in fleet.replicas.items() if replica.spec.admin_key is None]
        if names:
            level, more = (logging.WARNING, ONE_OWNER) if self._clients.need_key else (logging.INFO, "")
            log.log(level, WITHOUT_ADMIN_KEY, ", ".join(names), more)

    async def _hand_over(self, proxy: Proxy, replica: Replica) -> None:
        """Drain a replica that the file no longer names; streams that outlast the grace period move if they can."""
        if not await self._dispatcher.until_idle(replica, self._config.shutdown_grace_period_secs):
            proxy.remove(replica, movable_only=True)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """If a bug has ended a background task, end the gateway, so that its supervisor starts it again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed, and the gateway ends", exc_info=error)
            self._exit_code = ExitCode.CRASH
            self._stopping.set()

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(FILE_CHECK_S)
            for file in self._files:
                file.reload(if_changed=True)

    async def _serve(self, app: App, proxy: Proxy, fleet: Fleet) -> None:
        tls = server_context(self._config.ssl_certfile, self._config.ssl_keyfile)
        config = self._config
        limits = limits_for(config.max_connections, config.max_connections_per_address, config.queue_size)
        handle, apart = app.application.handle, app.metrics_application.handle
        deadlines = self._deadlines
        services = [HttpService(handle, [self._listener], limits, deadlines=deadlines, tls=tls, is_gateway=True)]
        if self._metrics_listener is not None:
            services.append(HttpService(apart, [self._metrics_listener], METRICS_LIMITS, deadlines=deadlines))
        for service in services:
            service.start()
        names = ", ".join(fleet.replicas)
        url = base_url(self._config.host, self.port, tls=tls is not None)
        log.info("a page for browsers: %s/", url.removesuffix("/v1"))
        print(f"phalanx gateway is ready: {url} (replicas: {names})", flush=True)
        self.ready.set()
        try:
            await self._stopping.wait()
            await self._drain(app, proxy)
        finally:
            for service in services:
                await service.stop()

    async def _drain(self, app: App, proxy: Proxy) -> None:
        app.close(CLOSING)
        grace = self._config.shutdown_grace_period_secs
        if app.unfinished:
            log.info("draining %d requests, %g s at most", app.unfinished, grace)
        if await app.wait_until_idle(grace, unless=self._stopping_at_once):
            return
        log.warning("%d requests did not end in time and are cut off", app.unfinished)
        proxy.close(NoReplica(CLOSING, retry_after=5.0))
        await app.wait_until_idle(FLUSH_S)


def _trusted(file: str | None) -> ssl.SSLContext | None:
    """The authorities that sign https replicas' certificates; None is the system's.

    Raises:
        ConfigError: the file has no certificate.
    """
    if file is None:
        return None
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:  # ssl.SSLError among them
        raise ConfigError(f"--worker-ca {file} cannot be used: {error.strerror or error}.") from error
