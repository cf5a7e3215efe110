"""Access to a server: which requests may use it, and which may manage the models on its disk."""

from __future__ import annotations

from phalanx.errors import AdminKeyRefused
from phalanx.http.api_keys import ApiKeys
from phalanx.http.http_exchange import Exchange
from phalanx.http.listening import is_loopback
from phalanx.http.owners import OWNER, owner_on_server
from phalanx.supervision.client import EngineClient
from phalanx.types import Batch, KeepOwners, ModelInfo


class Access:
    """The guards of a server's routes. Programs on this machine and clients with the admin key may manage models.
    Requests that a proxy on this machine forwards do not count as this machine's.
    """

    def __init__(self, keys: ApiKeys, admin_key: str | None) -> None:
        self._keys = keys
        self._admin_key = admin_key
        self._admin = None if admin_key is None else ApiKeys([admin_key])

    def client(self, exchange: Exchange) -> None:
        """Note the owner of the request's key.

        Raises:
            InvalidApiKey: there is no accepted API key.
            AdminKeyRefused: as `owner_on_server`.
        """
        self._note_owner(exchange, self._keys.owner(exchange.headers))

    def client_or_manager(self, exchange: Exchange) -> None:
        """As `client`, but the admin key also serves as an API key."""
        self._note_owner(exchange, "" if self.has_admin_key(exchange) else self._keys.owner(exchange.headers))

    def manager(self, exchange: Exchange) -> None:
        """As `client_or_manager`, and refuse requests that may not manage models.

        Raises:
            InvalidApiKey: as `client`.
            AdminKeyRefused: from another machine without the admin key.
        """
        self.client_or_manager(exchange)
        if not self.manages(exchange):
            raise AdminKeyRefused("Only this machine, or a client with the --admin-key, may change its models.")

    def manages(self, exchange: Exchange) -> bool:
        """Whether a request that passed `client_or_manager` may see and change the models on this disk."""
        is_own = is_loopback(exchange.address) and not any(name in exchange.headers for name in OF_PROXIES)
        return self.has_admin_key(exchange) or is_own

    def _note_owner(self, exchange: Exchange, own: str) -> None:
        exchange.owner = owner_on_server(own, exchange.headers.get(OWNER), self._admin_key)

    def has_admin_key(self, exchange: Exchange) -> bool:
        """Whether a request has this server's admin key."""
        return self._admin is not None and self._admin.may_see_details(exchange.headers)


class KeptOwners:
    """An engine's listener that has it delete what is on disk of keys that are not accepted any more."""

    def __init__(self, engine: EngineClient, keys: ApiKeys) -> None:
        self._engine = engine
        self._owners = keys.owners

    def on_ready(self, info: ModelInfo) -> None:
        """The engine has opened its disks."""
        self._engine.send(KeepOwners(self._owners))

    def on_down(self, reason: str, will_restart: bool) -> None:
        """Does nothing."""

    def on_batch(self, batch: Batch) -> None:
        """Does nothing."""


OF_PROXIES = ("x-forwarded-for", "x-real-ip", "forwarded", "via")
"""Headers by which a proxy names the client behind it."""
