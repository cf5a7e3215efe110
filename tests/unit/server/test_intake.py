"""Bodies that arrive slowly, in single bytes or many at once: what they take is bounded, and is given back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator

import pytest

from phalanx.errors import InvalidRequest, QueueFull, RequestTooLarge
from phalanx.http.body_budget import BodyLease
from phalanx.http.stream_records import RESUME_BYTES
from phalanx.server.fields.openai_bodies import CompletionBody
from phalanx.server.requests.intake import INLINE_BYTES, MAX_LARGE_BODIES, SMALL_BYTES, Intake

LARGEST = 1 << 20


def body_of(size: int) -> bytes:
    return b'{"prompt":"' + b"a" * (size - 13) + b'"}'


class Upload:
    """A request whose body the test sends."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.headers = {"content-type": "application/json"}

    def send(self, data: bytes, *, more: bool = True) -> None:
        self._parts.put_nowait(data)
        if not more:
            self._parts.put_nowait(None)

    def leave(self) -> None:
        self._parts.put_nowait(ConnectionResetError("the client has left"))

    async def pieces(self) -> AsyncGenerator[bytes]:
        while (part := await self._parts.get()) is not None:
            if isinstance(part, Exception):
                raise part
            yield part

    def read_by(self, intake: Intake, memory: BodyLease | None = None, n_before: int = 0) -> asyncio.Task[str]:
        prompt = intake.read(self, CompletionBody, lambda body: str(body.prompt), memory, n_before=n_before)
        return asyncio.create_task(prompt)


def run(scenario) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await scenario(Intake(LARGEST, lambda: None))

    asyncio.run(main())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_bodies_that_are_being_read_share_a_bounded_memory():
    """A hundred clients who each send all but the last byte took the memory of a hundred bodies."""

    async def scenario(intake):
        slow = [Upload() for _ in range(100)]
        tasks = [upload.read_by(intake) for upload in slow]
        body = body_of(LARGEST)
        for upload in slow:
            upload.send(body[:-1])
        await settle()
        waiting = [task for task in tasks if not task.done()]
        assert len(waiting) == MAX_LARGE_BODIES
        assert all(isinstance(task.exception(), QueueFull) for task in tasks if task.done())

        small = Upload()
        small.send(body_of(SMALL_BYTES), more=False)
        assert len(await small.read_by(intake)) == SMALL_BYTES - 13

        for upload, task in zip(slow, tasks, strict=True):
            if task is waiting[0]:
                upload.send(body[-1:], more=False)
            elif not task.done():
                upload.leave()
        assert len(await waiting[0]) == LARGEST - 13
        await asyncio.wait(waiting)
        assert all(isinstance(task.exception(), ConnectionResetError) for task in waiting[1:])

        again = [Upload() for _ in range(MAX_LARGE_BODIES)]
        for upload in again:
            upload.send(body, more=False)
        assert {len(text) for text in await asyncio.gather(*(upload.read_by(intake) for upload in again))} == {
            LARGEST - 13
        }

    run(scenario)


def test_what_comes_before_bodies_has_a_bounded_memory_of_its_own():
    async def scenario(intake):
        uploads = [Upload() for _ in range(MAX_LARGE_BODIES + 2)]
        *resumed, one_more, plain = uploads
        tasks = [upload.read_by(intake, n_before=RESUME_BYTES) for upload in resumed]
        await settle()
        with pytest.raises(QueueFull):
            await one_more.read_by(intake, n_before=RESUME_BYTES)
        plain.send(body_of(LARGEST), more=False)
        assert len(await plain.read_by(intake)) == LARGEST - 13
        for upload in resumed:
            upload.leave()
        await asyncio.wait(tasks)
        one_more.send(body_of(SMALL_BYTES), more=False)
        assert len(await one_more.read_by(intake, n_before=RESUME_BYTES)) == SMALL_BYTES - 13

    run(scenario)


def test_an_owner_whose_bodies_take_all_the_memory_keeps_no_other_one_out():
    async def scenario(intake):
        slow = [Upload() for _ in range(MAX_LARGE_BODIES)]
        for upload in slow:
            upload.read_by(intake, intake.memory("one"))
            upload.send(body_of(LARGEST)[:-1])
        await settle()
        for owner, is_read in [("one", False), ("two", True)]:
            upload = Upload()
            upload.send(body_of(LARGEST), more=False)
            with intake.memory(owner) as memory:
                outcome = (await asyncio.gather(upload.read_by(intake, memory), return_exceptions=True))[0]
            assert isinstance(outcome, str if is_read else QueueFull)

    run(scenario)


def test_a_body_keeps_its_memory_until_its_caller_has_used_it():
    """Parsed bodies waited for a thread to tokenise them, as many as there are connections."""

    async def scenario(intake):
        memories = [intake.memory("") for _ in range(MAX_LARGE_BODIES)]
        for memory in memories:
            upload = Upload()
            upload.send(body_of(LARGEST), more=False)
            await upload.read_by(intake, memory)
        for freed in (False, True):
            upload = Upload()
            upload.send(body_of(LARGEST), more=False)
            outcome = (await asyncio.gather(upload.read_by(intake), return_exceptions=True))[0]
            assert isinstance(outcome, str if freed else QueueFull)
            memories[0].free()

    run(scenario)


@pytest.mark.parametrize("piece", [1, 1000])
def test_a_body_in_small_pieces_is_cut_off_at_the_limit(piece):
    async def scenario(_):
        intake, upload = Intake(5000, lambda: None), Upload()
        for _ in range(20_000 // piece):
            upload.send(b" " * piece)
        with pytest.raises(RequestTooLarge):
            await upload.read_by(intake)
        assert upload._parts.qsize() >= 15_000 // piece - 1

    run(scenario)


def test_large_bodies_are_parsed_beside_the_event_loop_and_one_after_the_other():
    async def scenario(intake):
        parsing, most, threads, lock = 0, 0, set(), threading.Lock()

        def parse(body):
            nonlocal parsing, most
            with lock:
                parsing += 1
                most = max(most, parsing)
                threads.add(threading.current_thread())
            with lock:
                parsing -= 1
            return len(body.prompt)

        uploads = [Upload() for _ in range(3)]
        for upload in uploads:
            upload.send(body_of(INLINE_BYTES + 1), more=False)
        await asyncio.gather(*(intake.read(upload, CompletionBody, parse) for upload in uploads))
        assert most == 1 and threading.current_thread() not in threads
        small = Upload()
        small.send(body_of(INLINE_BYTES), more=False)
        await intake.read(small, CompletionBody, parse)
        assert threading.current_thread() in threads

    run(scenario)


def test_memory_is_given_back_by_bodies_that_are_refused():
    async def scenario(intake):
        for _ in range(3 * MAX_LARGE_BODIES):
            upload = Upload()
            upload.send(json.dumps({"prompt": "a", "x": "b" * (LARGEST // 2)}).encode(), more=False)
            with pytest.raises(InvalidRequest, match="Unrecognized"):
                await upload.read_by(intake)

    run(scenario)
