"""`phalanx gateway`: flags to settings, then one call. Needs no model and no MLX."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from phalanx.cli.setting_flags import Flags, text_of, with_settings
from phalanx.cli.terminal import note, set_up_logging
from phalanx.environment import (
    WORKER_ADMIN_KEY_VARIABLE,
    WORKER_KEY_VARIABLE,
    api_keys_from_environment,
    api_keys_in,
    key_from_environment,
)
from phalanx.errors import ConfigError
from phalanx.gateway.gateway_process import serve
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.http.api_keys import NOT_SENDABLE, is_sendable
from phalanx.http.listening import is_loopback


@with_settings
def command(
    config: Annotated[GatewayConfig, Flags()],
    worker_key_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True, help="File with the --worker-key.", rich_help_panel="Replicas"
        ),
    ] = None,
) -> int:
    """Stand in front of OpenAI-compatible servers as one address, until Ctrl-C or SIGTERM."""
    admin_key = config.worker_admin_key
    config = replace(
        config,
        api_key=tuple(dict.fromkeys(config.api_key)) or api_keys_from_environment(),
        worker_key=_worker_key(config.worker_key, worker_key_file),
        worker_admin_key=key_from_environment(WORKER_ADMIN_KEY_VARIABLE) if admin_key is None else admin_key,
    )
    given = {
        "--api-key": config.api_key,
        "--admin-key": (config.admin_key,),
        "--worker-key": (config.worker_key,),
        "--worker-admin-key": (config.worker_admin_key,),
    }
    for flag, keys in given.items():
        if any(key is not None and not is_sendable(key) for key in keys):
            raise ConfigError(f"{flag} {NOT_SENDABLE}.", remedy="`openssl rand -hex 32` prints a good one.")
    set_up_logging(config.log_level)
    if not is_loopback(config.host) and not config.api_key and config.keys is None:
        note(f"warning: {config.host} can be reached from other machines, and no key is asked for")
    return serve(config)


def _worker_key(given: str | None, file: Path | None) -> str | None:
    """The key of the flag or of the file; the variable counts only where there is neither.

    Raises:
        ConfigError: there are two, or the file has not exactly one.
    """
    if file is None:
        return key_from_environment(WORKER_KEY_VARIABLE) if given is None else given
    if given is not None:
        raise ConfigError("--worker-key and --worker-key-file are both given.", remedy="Give one of them.")
    keys = api_keys_in(text_of(file, "--worker-key-file"))
    if len(keys) != 1:
        raise ConfigError(f"--worker-key-file {file} has {len(keys)} keys.", remedy="Write one key on a line.")
    return keys[0]
