"""The command line, environment and settings with which each coding agent works with a server of phalanx."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping

from msgspec import Struct

KEY_VARIABLE = "PHALANX_API_KEY"  # where Codex looks for the key
NO_KEY = "none"  # agents refuse to start without any key; a server without keys takes every one
PATIENCE_MS = 3_000_000  # a long prompt takes minutes on a small machine
MIN_CONTEXT = 16_384
"""Tokens. The system prompts and tools of these agents take 6,000 to 20,000."""
MAX_OUTPUT = 8192  # tokens of an answer of Copilot's; what it keeps free of the context
NO_COST = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)
PI_VARIABLE = "PHALANX_PI_PROVIDER"
PI_EXTENSION = f"{__file__.rpartition('/')[0]}/pi_provider.js"
"""Reads PI_VARIABLE. pi takes servers from a settings file of the user's and from extensions, not from variables."""


class Target(Struct, frozen=True, kw_only=True):
    """The server and the model that an agent is to use."""

    url: str  # without /v1
    key: str | None
    model: str
    context: int | None  # tokens; None: the server does not say


class Launch(Struct, frozen=True, kw_only=True):
    """How to start an agent."""

    words: tuple[str, ...]  # the program and its arguments
    environment: Mapping[str, str]
    settings: str  # the content of a settings file that has the same effect
    use: str  # how a settings file FILE is used: a command with {file} in it
    install: str  # the command that installs the program


CLAUDE_MODELS = (
    "ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL",
)  # fmt: skip


def claude(target: Target) -> Launch:
    """Claude Code: Anthropic's dialect. All its model names mean the served model."""
    variables = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key or NO_KEY,
        **dict.fromkeys(CLAUDE_MODELS, target.model),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with every request, so that no prefix would be reused
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(PATIENCE_MS),
    }
    if target.context is not None:
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(target.context)  # it takes an unknown model's for a million
    return Launch(
        words=("claude",),
        environment=variables,
        settings=_json({"env": variables}),
        use="claude --settings {file}",
        install="npm install -g @anthropic-ai/claude-code",
    )


def codex(target: Target) -> Launch:
    """Codex: OpenAI's Responses. The settings are those of a profile."""
    provider = {
        "name": "phalanx",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "env_key": KEY_VARIABLE,
        "stream_idle_timeout_ms": PATIENCE_MS,
    }
    top: dict[str, str | int] = {"model": target.model, "model_provider": "phalanx"}
    if target.context is not None:
        top["model_context_window"] = target.context
    pairs = {**top, **{f"model_providers.phalanx.{name}": value for name, value in provider.items()}}
    lines = [f"{name} = {_toml(value)}" for name, value in top.items()]
    lines += ["", "[model_providers.phalanx]", *(f"{name} = {_toml(value)}" for name, value in provider.items())]
    return Launch(
        words=("codex", *(word for name, value in pairs.items() for word in ("-c", f"{name}={_toml(value)}"))),
        environment={KEY_VARIABLE: target.key or NO_KEY},
        settings="\n".join(lines) + "\n",
        use=f"codex --profile phalanx, with {{file}} as ~/.codex/phalanx.config.toml and the key in {KEY_VARIABLE}",
        install="npm install -g @openai/codex",
    )


def opencode(target: Target) -> Launch:
    """opencode: OpenAI's chat completions."""
    limit = {} if target.context is None else {"limit": {"context": target.context, "output": target.context // 2}}
    settings = _opencode_json(
        {
            "$schema": "https://opencode.ai/config.json",
            "model": f"phalanx/{target.model}",
            "small_model": f"phalanx/{target.model}",
            "provider": {
                "phalanx": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "phalanx",
                    "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key or NO_KEY},
                    "models": {target.model: {"name": target.model, **limit}},
                }
            },
        }
    )
    return Launch(
        words=("opencode",),
        environment={"OPENCODE_CONFIG_CONTENT": settings},
        settings=settings,
        use="OPENCODE_CONFIG={file} opencode",
        install="npm install -g opencode-ai",
    )


def aider(target: Target) -> Launch:
    """aider: OpenAI's chat completions, through litellm."""
    pairs = {
        "model": f"openai/{target.model}",
        "openai-api-base": f"{target.url}/v1",
        "openai-api-key": target.key or NO_KEY,
        "timeout": PATIENCE_MS // 1000,
    }
    words = [word for name, value in pairs.items() if name != "openai-api-key" for word in (f"--{name}", str(value))]
    return Launch(
        words=("aider", *words, "--no-show-model-warnings"),
        environment={"OPENAI_API_KEY": target.key or NO_KEY},  # not among the words, which every process can read
        settings="".join(f"{name}: {_toml(value)}\n" for name, value in pairs.items()) + "show-model-warnings: false\n",
        use="aider --config {file}",
        install="python -m pip install aider-install && aider-install",
    )


def copilot(target: Target) -> Launch:
    """GitHub Copilot CLI: OpenAI's chat completions. It needs no account where it has a provider of its own."""
    variables = {
        "COPILOT_PROVIDER_BASE_URL": f"{target.url}/v1",
        "COPILOT_PROVIDER_API_KEY": target.key or NO_KEY,
        "COPILOT_MODEL": target.model,
    }
    if target.context is not None:
        output = min(MAX_OUTPUT, target.context // 4)
        variables["COPILOT_PROVIDER_MAX_PROMPT_TOKENS"] = str(target.context - output)
        variables["COPILOT_PROVIDER_MAX_OUTPUT_TOKENS"] = str(output)
    return Launch(
        words=("copilot",),
        environment=variables,
        settings=_exports(variables),
        use=". {file} && copilot",
        install="npm install -g @github/copilot",
    )


def qwen(target: Target) -> Launch:
    """Qwen Code: OpenAI's chat completions. Without the words, settings of the user's go before the variables."""
    variables = {
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_API_KEY": target.key or NO_KEY,
        "OPENAI_MODEL": target.model,
    }
    return Launch(
        words=("qwen", "--auth-type", "openai", "--model", target.model),
        environment=variables,
        settings=_exports(variables),
        use='. {file} && qwen --auth-type openai --model "$OPENAI_MODEL"',
        install="npm install -g @qwen-code/qwen-code",
    )


def pi(target: Target) -> Launch:
    """pi: OpenAI's chat completions."""
    key = target.key or NO_KEY
    limits = {} if target.context is None else {"contextWindow": target.context, "maxTokens": target.context // 2}
    model = {"id": target.model, "name": target.model, "reasoning": False, "input": ["text"], "cost": NO_COST}
    provider = {
        "name": "phalanx",
        "baseUrl": f"{target.url}/v1",
        "apiKey": re.sub(r"\$|^!", r"$\g<0>", key),  # `$NAME` would be a variable, and `!` begin a command
        "api": "openai-completions",
        "models": [{**model, **limits}],
    }
    return Launch(
        words=("pi", "--extension", PI_EXTENSION, "--provider", "phalanx", "--model", target.model),
        environment={PI_VARIABLE: json.dumps(provider)},
        settings=_json({"providers": {"phalanx": provider}}),
        use="pi, with {file} as ~/.pi/agent/models.json and its command /model",
        install="npm install -g @earendil-works/pi-coding-agent",
    )


AGENTS: Mapping[str, Callable[[Target], Launch]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "aider": aider,
    "copilot": copilot,
    "qwen": qwen,
    "pi": pi,
}


def _exports(variables: Mapping[str, str]) -> str:
    """Commands for a POSIX shell that set these variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _toml(value: object) -> str:
    """A value for TOML and for YAML: as in JSON, but both read no pairs of surrogates."""
    return json.dumps(value, ensure_ascii=False)


def _opencode_json(value: object) -> str:
    """JSON in which nothing is replaced: opencode puts variables and files of this machine in the place of `{env:NAME}`
    and `{file:PATH}`, even in the name of a model."""
    return re.sub(r"\{(?=env:|file:)", r"\\u007b", _json(value))
