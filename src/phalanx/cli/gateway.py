"""`phalanx gateway`: flags to settings, then one call. Needs no model and no MLX."""

from __future__ import annotations

from typing import Annotated

from msgspec.structs import replace

from phalanx.cli.setting_flags import Flags, with_settings
from phalanx.cli.terminal import note, set_up_logging
from phalanx.environment import api_keys_from_environment, worker_admin_key_from_environment
from phalanx.errors import ConfigError
from phalanx.gateway.gateway_process import serve
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.http.api_keys import NOT_SENDABLE, is_sendable
from phalanx.http.listening import is_loopback


@with_settings
def command(config: Annotated[GatewayConfig, Flags()]) -> int:
    """Stand in front of OpenAI-compatible servers as one address, until Ctrl-C or SIGTERM."""
    config = replace(
        config,
        api_key=tuple(dict.fromkeys(config.api_key)) or api_keys_from_environment(),
        worker_admin_key=config.worker_admin_key or worker_admin_key_from_environment(),
    )
    given = {"--api-key": config.api_key, "--admin-key": (config.admin_key,)}
    for flag, keys in given.items():
        if any(key is not None and not is_sendable(key) for key in keys):
            raise ConfigError(f"{flag} {NOT_SENDABLE}.", remedy="`openssl rand -hex 32` prints a good one.")
    set_up_logging(config.log_level)
    if not is_loopback(config.host) and not config.api_key and config.keys is None:
        note(f"warning: {config.host} can be reached from other machines, and no key is asked for")
    return serve(config)
