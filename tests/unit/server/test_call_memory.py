"""The memory of answers that called tools: what is found, what it may take, and whose it is."""

from __future__ import annotations

from array import array

import pytest
from msgspec.structs import replace

from phalanx.server.answers.answer_parts import AnswerParts, Written
from phalanx.server.answers.call_memory import CHAR_BYTES, CallMemory, Turn, digests
from phalanx.server.answers.deltas import CallDelta, join_calls
from phalanx.server.outputs.pieces import (
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Piece,
    ReasoningPiece,
    TextPiece,
)

ASK = {"role": "user", "content": "How is it?"}


def turn(id="a", n_tokens=10, reasoning="", before=b"") -> Turn:
    written = Written(ids=(id,), calls=(("f", '{"a": 1}'),), text="I ask.", reasoning=reasoning)
    return Turn(before=before or digests([ASK], {})[-1], written=written, tokens=array("i", range(n_tokens)))


def message(id="a", **fields):
    call = {"id": id, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    return {"role": "assistant", "content": "I ask.", "tool_calls": [call], **fields}


def found(memory, *messages, owner="me"):
    last = memory.recall(owner, [ASK, *messages], {}).last
    return None if last is None else (last[0], last[1].id)


def test_an_answer_is_found_in_its_conversation_only():
    memory = CallMemory()
    memory.remember("me", turn())
    assert found(memory, message()) == (1, "a")
    assert found(memory, message(), {"role": "tool", "content": "x"}) == (1, "a")
    assert found(memory, message(content=" I ask.\n")) == (1, "a")  # clients strip
    assert found(memory, ASK, message()) is None
    assert memory.recall("me", [ASK, message()], {"tools": []}).last is None
    assert found(memory, message(), owner="you") is None
    assert found(memory, message(id="b")) is None


def test_the_last_of_several_counts():
    memory = CallMemory()
    memory.remember("me", turn())
    later = [ASK, message(), ASK]
    memory.remember("me", turn("b", before=digests(later, {})[-1]))
    assert found(memory, message(), ASK, message("b")) == (3, "b")
    assert found(memory, message(), ASK, message("b", content="Other.")) == (1, "a")


def test_reasoning_that_a_client_does_not_send_is_put_back():
    memory = CallMemory()
    memory.remember("me", turn(reasoning="Hm."))
    recalled = memory.recall("me", [ASK, message()], {})
    assert recalled.messages == [ASK, message(reasoning_content="Hm.")]
    assert recalled.digest == memory.recall("me", [ASK, message(reasoning_content="Hm.")], {}).digest
    other = memory.recall("me", [ASK, message(reasoning_content="Ah.")], {})
    assert other.messages[1]["reasoning_content"] == "Ah." and other.last is None


def test_old_answers_make_way_within_their_key():
    memory = CallMemory(owner_bytes=3 * turn(n_tokens=100).n_bytes)
    memory.remember("you", turn("yours", 100))
    for id in "abc":
        memory.remember("me", turn(id, 100))
    assert found(memory, message("a")) and found(memory, message("b"))  # used again, so that c is the oldest
    memory.remember("me", turn("d", 100))
    assert [bool(found(memory, message(id))) for id in "abcd"] == [True, True, False, True]
    memory.remember("me", turn("huge", 1000))  # larger than all may be: it makes none go
    assert [bool(found(memory, message(id))) for id in ("a", "b", "d", "huge")] == [True, True, True, False]
    assert found(memory, message("yours"), owner="you")


def test_texts_and_arguments_of_an_answer_count():
    plain = turn()
    one = Written(ids=("a",), calls=(("f", "x" * 1000),), text="y" * 1000, reasoning="z" * 1000)
    more = 1000 * 3 + 1 - plain.written.n_chars
    assert replace(plain, written=one).n_bytes == plain.n_bytes + CHAR_BYTES * more


# Parts of an answer ------------------------------------------------------------------------------------------------


class Given:
    """A parser whose pieces are given: the text is a number of one of the lists."""

    detail = ""

    def __init__(self, *pieces: list[Piece]) -> None:
        self._pieces = pieces

    def add(self, text: str) -> list[Piece]:
        return list(self._pieces[int(text)])

    def finish(self) -> list[Piece]:
        return []


def parts_of(*pieces, one_call=False):
    parts = AnswerParts(Given(*pieces), one_call=one_call, id_of="abc".__getitem__)
    return parts, [parts.add(str(i), 2) for i in range(len(pieces))]


def test_parts_of_calls_are_numbered_and_joined():
    parts, seen = parts_of(
        [TextPiece("x"), CallBegin("f"), CallArguments('{"a"')],
        [CallArguments(":1}"), CallEnd("..."), CallBegin("g"), CallArguments("{}"), CallEnd("...")],
    )
    assert seen[0].text == "x"
    assert join_calls(seen[0].calls) == (CallDelta(index=0, id="a", name="f", arguments='{"a"'),)
    assert join_calls(seen[1].calls) == (
        CallDelta(index=0, arguments=":1}"),
        CallDelta(index=1, id="b", name="g", arguments="{}"),
    )
    written = parts.written()
    assert written is not None
    assert (written.ids, written.calls) == (("a", "b"), (("f", '{"a":1}'), ("g", "{}")))


def test_an_answer_with_a_broken_call_is_not_remembered():
    whole = [CallBegin("f"), CallArguments("{}"), CallEnd("...")]
    parts, seen = parts_of(whole, [CallBegin("g"), CallArguments("{"), CallBroken(), TextPiece("{")])
    assert parts.called and parts.written() is None
    assert join_calls(seen[1].calls) == (CallDelta(index=1, id="b", name="g", arguments="{", broken=True),)


def test_only_one_call():
    call = [CallBegin("f"), CallArguments("{}"), CallEnd("...")]
    parts, seen = parts_of([*call, TextPiece("more"), *call], one_call=True)
    assert parts.ended and not seen[0].text and len(join_calls(seen[0].calls)) == 1


@pytest.mark.parametrize(
    ("pieces", "n"),
    [
        ([[TextPiece("a")], [TextPiece("b")]], 0),
        # an opening mark; a closing one is the text's
        ([[], [ReasoningPiece("a")], [ReasoningPiece("b")], [], [TextPiece("c")]], 6),
        ([[ReasoningPiece("a")], [ReasoningPiece("b"), TextPiece("c")], [TextPiece("d")], [ReasoningPiece("e")]], 6),
    ],
)
def test_tokens_of_reasoning_are_counted(pieces, n):
    assert parts_of(*pieces)[0].reasoning_tokens == n
