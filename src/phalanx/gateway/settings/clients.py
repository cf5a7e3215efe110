"""The accepted API keys, from flags and the file, and the limits of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from phalanx.gateway.settings.key_limits import KeyMeter, KeyUse
from phalanx.gateway.settings.keys_file import NamedKey
from phalanx.http.api_keys import ApiKeys, owner_of


class Clients:
    """See the module's docstring.

    Args:
        keys: from flags; they have no limits.
    """

    def __init__(self, keys: Sequence[str], clock: Callable[[], float]) -> None:
        self._keys = tuple(keys)
        self._clock = clock
        self._accepted = ApiKeys(self._keys)
        self._names: dict[str, str] = {}
        self._meter = KeyMeter({})
        self.need_key = bool(keys)

    def set_named(self, named: Sequence[NamedKey]) -> None:
        """Replace the keys of the file."""
        self._accepted = ApiKeys([*self._keys, *(key.key for key in named)])
        self._names = {owner_of(key.key): key.name for key in named}
        self._meter.set_limits({owner_of(key.key): key.limits for key in named})
        self.need_key = bool(self._keys or named)

    def accepts(self, owner: str) -> bool:
        """Whether the key of this owner, or no key, is accepted now: the file may have changed."""
        return owner in self._accepted.owners

    def owner(self, headers: Mapping[str, str]) -> str:
        """The owner of the key in these headers; "" if no key is needed.

        Raises:
            InvalidApiKey: there is no key, or it is not accepted.
        """
        return self._accepted.owner(headers)

    def may_see_details(self, headers: Mapping[str, str]) -> bool:
        """Whether these headers have a key, or none is needed."""
        return self._accepted.may_see_details(headers)

    def name(self, owner: str) -> str:
        """The owner's name in the file, for the log."""
        return self._names.get(owner, owner[:8] or "-")

    def begin(self, owner: str) -> KeyUse:
        """A request begins; `end` must follow.

        Raises:
            RateLimited: the key is at a limit.
        """
        return self._meter.begin(owner, self._clock())

    def reserve(self, use: KeyUse, n_tokens: int, rows: int) -> None:
        """Reserve the tokens (of prompt and answers) and the answers that a request is expected to need.

        Raises:
            RateLimited, InvalidRequest: its key has no room for them; see `KeyMeter.reserve`.
        """
        self._meter.reserve(use, n_tokens, self._clock(), rows=rows)

    def end(self, use: KeyUse, n_tokens: int) -> None:
        """A request has ended; it took so many tokens."""
        self._meter.end(use, n_tokens, self._clock())
