"""`phalanx.LLM`: answers prompts from a script, with vLLM's names and without a server.

    with LLM("demo", tensor_parallel_size=2) as llm:
        for output in llm.generate(["Hello", "Once upon a time"], SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

The calls block. The engine and its event loop run beside the caller, the loop in a thread of its own.
`local_engine.py` answers the requests.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from phalanx.config import DEFAULT_MODEL
from phalanx.errors import EngineUnavailable, InvalidRequest
from phalanx.offline.engine_settings import engine_config
from phalanx.offline.local_engine import LocalEngine
from phalanx.offline.outputs import RequestOutput
from phalanx.offline.sampling_params import SamplingParams
from phalanx.server.fields.openai_bodies import ChatBody, CompletionBody
from phalanx.supervision.process import EngineProcess

Prompt = str | Mapping[str, Any]
"""A text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`."""
Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`"""
Params = SamplingParams | Sequence[SamplingParams] | None
Body = ChatBody | CompletionBody
T = TypeVar("T")


class LLM:
    """One model, loaded; a context manager. Its processes end with `close`, with the object, or with the interpreter.

    Args:
        model: a directory, a hub id, or `demo`, the bundled model.
        settings: fields of `phalanx.config.EngineConfig`: the engine's flags of `phalanx serve`, with underscores.

    Raises:
        ConfigError: an unknown setting, or a bad value; names it.
        ModelError: the model cannot be loaded.
        EngineUnavailable: the engine did not start; with its reason.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, **settings: Any) -> None:
        config = engine_config(model, settings)
        self._engine = LocalEngine(config, EngineProcess(config))
        self._in_flight = 2 * config.max_num_seqs  # prompts: a row that ends finds the next one at the engine
        self._thread = EngineThread(self._engine)
        self._closer = weakref.finalize(self, self._thread.close)
        with ExitStack() as stack:
            stack.callback(self.close)
            self._thread.run(self._engine.start())
            stack.pop_all()

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Continue each prompt; `max_num_seqs` of them are computed together, the others wait.

        Args:
            sampling_params: for all prompts, or one per prompt; None is the model's defaults.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            InvalidRequest: a prompt or a parameter cannot be used; names it. The other prompts are given up.
            EngineError: the engine failed, or the LLM is closed.
        """
        several = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        params = _one_each(sampling_params, len(several))
        bodies = [_completion(prompt, one, i) for i, (prompt, one) in enumerate(zip(several, params, strict=True))]
        return self._answer(bodies, params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template.

        As with vLLM, `text` is what the model wrote: calls of tools and reasoning stand in it in the model's own form.

        Args:
            messages: the messages of a conversation, or a list of conversations.
            sampling_params: for all conversations, or one per conversation; None is the model's defaults.
            add_generation_prompt: end the prompt with the start of the model's answer.
            continue_final_message: continue the last message, which is the model's, instead.
            tools: that the chat template shows to the model, as `{"type": "function", "function": {...}}`.
            chat_template_kwargs: further variables of the chat template.

        Returns:
            One output per conversation, in their order.

        Raises:
            InvalidRequest: a conversation or a parameter cannot be used; names it. The others are given up.
            EngineError: the engine failed, or the LLM is closed.
        """
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        params = _one_each(sampling_params, len(several))
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": {
                **(chat_template_kwargs or {}),
                **({} if tools is None else {"tools": [dict(tool) for tool in tools]}),
            },
        }
        bodies = [_chat(one, its, template, i) for i, (one, its) in enumerate(zip(several, params, strict=True))]
        return self._answer(bodies, params)

    def close(self) -> None:
        """End the engine's processes and cancel running requests. Safe to call twice."""
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, bodies: Sequence[Body], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        return self._thread.run(self._answer_all(bodies, params))

    async def _answer_all(self, bodies: Sequence[Body], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        places = asyncio.Semaphore(self._in_flight)

        async def answer(index: int) -> RequestOutput:
            async with places:
                try:
                    return await self._engine.answer(bodies[index], prompt_logprobs=params[index].prompt_logprobs)
                except InvalidRequest as error:
                    raise _of(error, index, len(bodies)) from error

        tasks = [asyncio.create_task(answer(index)) for index in range(len(bodies))]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()


class EngineThread:
    """An event loop in a thread of its own that ends a `LocalEngine` when it ends."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._process = os.getpid()
        self._running = threading.Event()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="phalanx LLM", daemon=True)
        self._thread.start()
        self._running.wait()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine; an interrupt (Ctrl-C) cancels it.

        Raises:
            EngineUnavailable: the thread has ended, or ends meanwhile, or is another process's.
        """
        if os.getpid() != self._process:
            work.close()
            raise EngineUnavailable("This LLM belongs to the process that forked.", remedy="Make another one here.")
        if self._ending.is_set():
            work.close()
            raise EngineUnavailable("This LLM is closed.", remedy="Make another one.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise EngineUnavailable("The LLM was closed before it had answered.") from error
        finally:
            future.cancel()

    def close(self) -> None:
        """End the engine and the thread."""
        if os.getpid() != self._process or not self._thread.is_alive():
            return  # a fork has the object, but neither the thread nor the processes
        self._loop.call_soon_threadsafe(self._ending.set)
        if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
            self._thread.join()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running.set()
        try:
            await self._ending.wait()
        finally:
            await self._engine.close()


def _one_each(given: Params, n: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [_checked(given or SamplingParams())] * n
    if isinstance(given, Mapping) or not isinstance(given, Sequence):
        raise InvalidRequest("sampling_params are SamplingParams, or a list of them.", param="sampling_params")
    if len(given) != n:
        raise InvalidRequest(f"There are {len(given)} sampling_params for {n} prompts.", param="sampling_params")
    return [_checked(params) for params in given]


def _checked(params: SamplingParams) -> SamplingParams:
    """The parameters, if they are some. A request has no field for `prompt_logprobs`, so its type is checked here."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"{params!r} is not SamplingParams.", param="sampling_params")
    scored = params.prompt_logprobs
    if scored is not None and type(scored) is not int:
        raise InvalidRequest(f"prompt_logprobs must be a whole number, not {scored!r}.", param="prompt_logprobs")
    return params


def _completion(prompt: Prompt, params: SamplingParams, index: int) -> CompletionBody:
    given: Any = prompt
    if isinstance(prompt, Mapping):
        if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
            raise InvalidRequest(
                f"prompt {index} has the keys {', '.join(map(str, prompt)) or '(none)'}; it needs prompt or "
                "prompt_token_ids.",
                param="prompts",
            )
        ((key, given),) = prompt.items()
        if isinstance(given, str) != (key == "prompt"):
            raise InvalidRequest(f"prompt {index}: {key} is a {type(given).__name__}.", param="prompts")
    if isinstance(given, list) and any(type(token) is not int for token in given):
        raise InvalidRequest(f"prompt {index}: a list has to be of token ids.", param="prompts")
    return _parse(CompletionBody, {"prompt": given, "logprobs": params.logprobs, **params.fields()}, index)


def _chat(messages: Any, params: SamplingParams, template: Mapping[str, Any], index: int) -> ChatBody:
    scored = {} if params.logprobs is None else {"logprobs": True, "top_logprobs": params.logprobs}
    return _parse(ChatBody, {"messages": messages, **template, **scored, **params.fields()}, index)


B = TypeVar("B", ChatBody, CompletionBody)


def _parse(kind: type[B], fields: Mapping[str, Any], index: int) -> B:
    """A request of these fields.

    Raises:
        InvalidRequest: one of them has a wrong type; names prompt and field.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        wrong, _, place = str(error).partition(" - at `$.")
        name = re.split(r"[.\[`]", place)[0]
        raise InvalidRequest(f"prompt {index}: {place.rstrip('`') or 'the fields'}: {wrong}.", param=name) from error


def _of(error: InvalidRequest, index: int, n: int) -> InvalidRequest:
    """The error, with the prompt it belongs to."""
    message = error.message if n == 1 else f"prompt {index}: {error.message}"
    return InvalidRequest(message, param=error.param, code=error.code)
