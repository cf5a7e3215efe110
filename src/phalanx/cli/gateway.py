"""`phalanx gateway`: flags to settings, then one call. Needs no model and no MLX."""

from __future__ import annotations

from typing import Annotated

from phalanx.cli.setting_flags import Flags, with_settings
from phalanx.cli.terminal import note, set_up_logging
from phalanx.gateway.gateway_process import serve
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.http.listening import is_loopback


@with_settings
def command(config: Annotated[GatewayConfig, Flags()]) -> int:
    """Stand in front of OpenAI-compatible servers as one address, until Ctrl-C or SIGTERM."""
    set_up_logging(config.log_level)
    if not is_loopback(config.host) and not config.api_key and config.keys is None:
        note(f"warning: {config.host} can be reached from other machines, and no key is asked for")
    return serve(config)
