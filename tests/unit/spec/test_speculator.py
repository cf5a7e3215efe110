"""What the drafter and the controller are told, and when: commits and nothing else (A2)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import structs

from phalanx.sched.plan import Commit, Forward, Free, Step
from phalanx.sched.sequence import Sequence as Row
from phalanx.spec.comparison import Comparison
from phalanx.spec.control import Took
from phalanx.spec.drafters import Draft, Drafter, RandomDrafter
from phalanx.spec.rules import Always
from phalanx.spec.speculator import Speculator
from phalanx.spec.stats import SpecMeter
from phalanx.types import Sampling, SequenceRequest, StopRule

VOCAB = 100


class Recorder(Always, Drafter):
    """A drafter and a controller that write down what they hear."""

    def __init__(self, drafts: Mapping[int, list[int]], most: int = 4) -> None:
        super().__init__(most)
        self.heard: list[tuple[object, ...]] = []
        self.drafts = drafts

    def begin(self, key: int, tokens: Sequence[int], salt: str = "") -> None:
        self.heard.append(("begin", key, list(tokens), salt))

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        self.heard.append(("extend", key, list(tokens)))

    def end(self, key: int) -> None:
        self.heard.append(("end", key))

    def draft(self, wanted: Mapping[int, int]) -> dict[int, Draft]:
        return {key: Draft.by_position(self.drafts[key][:n]) for key, n in wanted.items() if key in self.drafts}

    def observe(self, committed: Mapping[int, Sequence[int]], verified: Mapping[int, int], took: Took) -> None:
        tokens = {key: list(tokens) for key, tokens in committed.items()}
        self.heard.append(("observe", tokens, dict(verified), took.all, took.drafting))


def row(number: int, tokens: list[int], most_drafts: int | None = None) -> Row:
    stop = StopRule(max_tokens=50)
    request = SequenceRequest(
        id=str(number),
        group="g",
        prompt=tokens,
        sampling=Sampling(),
        stop=stop,
        cache_salt="key",
        most_drafts=most_drafts,
    )
    return Row(number, request, 0.0)


def decoding(fed: dict[int, tuple[int, ...]]) -> Step:
    valid = tuple(map(len, fed.values()))
    forward = Forward(0, 0, tuple(fed), tuple(fed.values()), valid, sample=True)
    return Step(id=1, commits=(), ops=(), forwards=(forward,), digest=0)


def speculator(drafts: Mapping[int, list[int]]) -> tuple[Speculator, Recorder]:
    recorder = Recorder(drafts)
    return Speculator(recorder, recorder, SpecMeter("test"), VOCAB), recorder


def test_a_sequence_from_its_first_draft_to_its_end():
    spec, recorder = speculator({0: [7, 8]})
    assert spec.draft({row(0, [1, 2]): 10}) == {0: [7, 8]}
    commit = Commit(seq=0, tokens=(7, 9), computed=4, kv_len=3)
    spec.observe(decoding({0: (2, 7, 8)}), {0: [7, 9]}, [commit], 0.5, 0.1)
    spec.keep({0})
    spec.keep(set())
    assert recorder.heard == [
        ("begin", 0, [1, 2], "key"), ("extend", 0, [7, 9]), ("observe", {0: [7, 9]}, {0: 2}, 0.5, 0.1),
        ("end", 0), ("end", 0),
    ]  # fmt: skip
    stats = spec.meter.stats()
    assert (stats.drafts, stats.drafted, stats.accepted, stats.accepted_at) == (1, 2, 1, [1, 0])


def test_a_draft_ends_before_a_token_that_the_target_does_not_have():
    spec, _ = speculator({0: [7, VOCAB, 8], 1: [-1, 4], 2: [5]})
    assert spec.draft({row(n, [1]): 10 for n in range(4)}) == {0: [7], 2: [5]}


def test_rows_without_room_are_followed_but_not_drafted_for():
    spec, recorder = speculator({0: [7]})
    assert spec.draft({row(0, [1]): 0}) == {}
    assert recorder.heard == [("begin", 0, [1], "key")]


def test_steps_whose_requests_all_refuse_drafts_are_only_learned_from():
    """They neither cost nor earn what the control may spend on others."""
    spec, recorder = speculator({0: [7]})
    commit = Commit(seq=0, tokens=(7,), computed=3, kv_len=3)
    refusing = row(0, [1, 2], most_drafts=0)
    assert spec.draft({refusing: 0}) == spec.draft({refusing: 0}, overlapped=True) == {}
    spec.observe(decoding({0: (2,)}), {0: [7]}, [commit], 0.5, 0.1)
    assert recorder.heard == [("begin", 0, [1, 2], "key"), ("extend", 0, [7])]
    spec.draft({refusing: 0, row(1, [1]): 5})
    spec.observe(decoding({0: (7,)}), {0: [8]}, [], 0.5, 0.1)
    assert recorder.heard[-1][0] == "observe"


def test_what_was_committed_is_the_history_not_what_was_verified():
    """A stop id clips accepted drafts away: they count as accepted, and nobody learns from them."""
    spec, recorder = speculator({0: [7, 8]})
    spec.draft({row(0, [1, 2]): 10})
    commit = Commit(seq=0, tokens=(7,), computed=4, kv_len=2, finish="stop", stop_id=7)
    spec.observe(decoding({0: (2, 7, 8)}), {0: [7, 8, 9]}, [commit], 0.5, 0.1)
    assert recorder.heard[1] == ("extend", 0, [7])
    assert spec.meter.stats().accepted == 2


def test_what_is_unread_is_read_first_and_not_drafted_for():
    """Ten tokens a step; a sequence of which no draft is of use is not read."""

    class Reader(RandomDrafter):
        unread = {0: 15, 1: 30}

        def behind(self, keys):
            return {key: self.unread[key] for key in keys if self.unread.get(key)}

        def read(self, tokens):
            heard.append(("read", dict(tokens)))
            for key, n in tokens.items():
                self.unread[key] -= n
            return sum(tokens.values())

    class Slow(Always):
        read_at_once = 10

        def has_read(self, tokens, seconds):
            heard.append(("has read", tokens, seconds > 0))

    heard: list[object] = []
    spec = Speculator(Reader(VOCAB), Slow(1), SpecMeter("test"), VOCAB)
    rows = {row(0, [1]): 5, row(1, [1]): 0, row(2, [1]): 5}
    assert [spec.draft(rows).keys() for _ in range(3)] == [{2}, {0, 2}, {0, 2}]
    assert heard == [("read", {0: 10}), ("has read", 10, True), ("read", {0: 5}), ("has read", 5, True)]


def test_reading_is_not_counted_as_drafting():
    spec, recorder = speculator({0: [7, 8]})
    spec.draft({row(0, [1, 2]): 10})
    spec._reading_s = 0.0625
    spec.observe(decoding({0: (2,)}), {0: [7]}, [Commit(seq=0, tokens=(7,), computed=3, kv_len=3)], 0.5, 0.125)
    assert recorder.heard[-1][3:] == (0.4375, 0.0625)


def test_what_a_step_took_is_not_handed_on_where_rows_were_moved_as_well():
    spec, recorder = speculator({0: [7, 8]})
    spec.draft({row(0, [1, 2]): 10})
    step = structs.replace(decoding({0: (2, 7, 8)}), ops=(Free(0, 3),))
    spec.observe(step, {0: [7, 9]}, [Commit(seq=0, tokens=(7, 9), computed=4, kv_len=3)], 0.5, 0.1)
    assert recorder.heard[-1] == ("observe", {0: [7, 9]}, {0: 2}, None, 0.1)


def test_what_a_step_took_is_not_handed_on_where_it_says_nothing_about_others():
    spec, recorder = speculator({0: [7, 8]})
    spec.draft({row(0, [1, 2]): 10})
    commit = Commit(seq=0, tokens=(7, 9), computed=4, kv_len=3)
    spec.observe(decoding({0: (2, 7, 8)}), {0: [7, 9]}, [commit], None, 0.1)
    assert recorder.heard[-1] == ("observe", {0: [7, 9]}, {0: 2}, None, 0.1)


def test_a_step_that_only_prefills_is_not_observed():
    spec, recorder = speculator({})
    step = Step(id=1, commits=(), ops=(), forwards=(Forward(0, 0, (3,), ((1, 2),), (2,), sample=False),), digest=0)
    spec.observe(step, {}, [Commit(seq=3, tokens=(), computed=2, kv_len=2)], 0.5, 0.1)
    assert recorder.heard == []
    assert spec.meter.stats().steps == 0


def test_a_step_that_takes_no_drafts_still_judges_what_a_lookup_finds():
    class Judge(Recorder):
        def forgo(self, drafts: Mapping[int, Draft]) -> None:
            self.heard.append(("forgo", {key: draft.tokens for key, draft in drafts.items()}))

    judge = Judge({0: [7, 8]})
    spec = Speculator(judge, judge, SpecMeter("test"), VOCAB)
    assert spec.draft({row(0, [1, 2]): 10}, overlapped=True) == {}
    assert judge.heard == [("begin", 0, [1, 2], "key"), ("forgo", {0: [7, 8]})]


def test_nobody_is_asked_while_the_control_sleeps():
    class Sleeper(Recorder):
        def naps(self, keys: Collection[int]) -> int:
            return 3

        def slept(self, keys: Collection[int], steps: int) -> None:
            self.heard.append(("slept", sorted(keys), steps))

    def step(rows: Mapping[int, Row]) -> dict[int, list[int]]:
        drafts = spec.draft(dict.fromkeys(rows.values(), 10))
        spec.can_overlap(rows)
        commits = [Commit(seq=number, tokens=(5,), computed=3, kv_len=3) for number in rows]
        spec.observe(decoding(dict.fromkeys(rows, (2,))), {number: [5] for number in rows}, commits, 0.5, 0.1)
        return drafts

    def heard() -> list[object]:
        said = [what for what, *_ in sleeper.heard if what != "extend"]
        sleeper.heard.clear()
        return said

    sleeper = Sleeper({0: [7, 8]})
    spec = Speculator(sleeper, sleeper, SpecMeter("test"), VOCAB)
    one, two = row(0, [1, 2]), row(1, [1])
    assert step({0: one}) == {0: [7, 8]} and heard() == ["begin", "observe"]
    assert [step({0: one}) for _ in range(3)] == [{}] * 3
    assert sleeper.heard == [*[("extend", 0, [5])] * 3, ("slept", [0], 3)] and heard() == ["slept"]
    assert step({0: one}) == {0: [7, 8]} and heard() == ["observe"]
    assert step({0: one}) == {} and heard() == []
    assert step({0: one, 1: two}) == {0: [7, 8]} and heard() == ["slept", "begin", "observe"]  # another sequence
    assert step({0: one, 1: two}) == {} and heard() == []
    spec.keep({1})
    assert sleeper.heard[0] == ("slept", [0, 1], 1) and heard() == ["slept", "end", "end"]
    step({1: two})
    assert heard() == ["observe"]


def test_a_model_is_not_asked_for_a_step_that_takes_no_drafts():
    class Model(Recorder):
        @property
        def computes(self) -> bool:
            return True

    model = Model({0: [7, 8]})
    spec = Speculator(model, model, SpecMeter("test"), VOCAB)
    assert spec.draft({row(0, [1, 2]): 10}, overlapped=True) == {}
    assert model.heard == []
    assert spec.draft({row(0, [1, 2]): 10}) == {0: [7, 8]}


class Compared(Recorder):
    def hear(self, committed: Mapping[int, Sequence[int]]) -> None:
        self.heard.append(("hear", {key: list(tokens) for key, tokens in committed.items()}))

    def rests(self, keys: Collection[int]) -> bool:
        self.heard.append(("rests",))
        return False


class Chosen(Comparison):
    """Says what the test says."""

    def __init__(self, kinds: Sequence[bool]) -> None:
        super().__init__(1)
        self.kinds = kinds

    def _may_draft(self, step: int) -> bool:
        return self.kinds[step]


def test_steps_that_are_compared_with_cost_nothing_and_are_told_of_afterwards():
    """One with drafts, two without, one with: the drafter misses nothing, and in the right order."""
    recorder = Compared({0: [7, 8]})
    comparison = Chosen([True, True, False, False, True, True])
    spec = Speculator(recorder, recorder, SpecMeter("test"), VOCAB, comparison)
    one = row(0, [1, 2])

    def step(token: int) -> dict[int, list[int]]:
        drafts = spec.draft({one: 10})
        recorder.heard.append(("step",))
        spec.can_overlap({0})
        commit = Commit(seq=0, tokens=(token,), computed=3, kv_len=3)
        spec.observe(decoding({0: (2,)}), {0: [token]}, [commit], 0.5, 0.1)
        return drafts

    assert [step(token) for token in (11, 12, 13, 14)] == [{0: [7, 8]}, {}, {}, {0: [7, 8]}]
    observed = [("observe", {0: [token]}, {}, 0.5, 0.1) for token in (11, 14)]
    assert recorder.heard == [
        ("begin", 0, [1, 2], "key"), ("step",), ("extend", 0, [11]), observed[0],
        ("step",),
        ("step",), ("rests",),
        ("extend", 0, [12]), ("hear", {0: [12]}), ("extend", 0, [13]), ("hear", {0: [13]}),
        ("step",), ("rests",), ("extend", 0, [14]), observed[1],
    ]  # fmt: skip
    assert comparison.drafted.tokens == 1 and comparison.plain.tokens == 2  # the last one is not over


def test_of_those_that_ended_while_nothing_was_drafted_nobody_hears():
    recorder = Compared({})
    spec = Speculator(recorder, recorder, SpecMeter("test"), VOCAB, Chosen([True, True, False, True]))
    one, two = row(0, [1, 2]), row(1, [3])
    spec.draft({one: 10, two: 10})
    spec.draft({one: 10, two: 10})
    commits = [Commit(seq=number, tokens=(5,), computed=3, kv_len=3) for number in (0, 1)]
    spec.observe(decoding({0: (2,), 1: (2,)}), {0: [5], 1: [5]}, commits, 0.5, 0.1)
    spec.keep({1})
    spec.draft({two: 10})
    assert recorder.heard[2:] == [("end", 0), ("end", 0), ("extend", 1, [5]), ("hear", {1: [5]})]


def test_a_sequence_that_began_while_nothing_was_drafted_is_followed_from_its_beginning():
    recorder = Compared({})
    spec = Speculator(recorder, recorder, SpecMeter("test"), VOCAB, Chosen([True, False, True]))
    one = row(0, [1, 2])
    spec.draft({one: 10})
    one.tokens.append(5)
    spec.observe(decoding({0: (2,)}), {0: [5]}, [Commit(seq=0, tokens=(5,), computed=3, kv_len=3)], 0.5, 0.1)
    spec.draft({one: 10})
    assert recorder.heard == [("begin", 0, [1, 2, 5], "key")]


def test_steps_that_move_rows_or_prefill_are_not_compared():
    recorder = Compared({})
    comparison = Comparison(1)
    spec = Speculator(recorder, recorder, SpecMeter("test"), VOCAB, comparison)
    one, commit = row(0, [1, 2]), Commit(seq=0, tokens=(5,), computed=3, kv_len=3)
    chunk = Forward(0, 0, (3,), ((1, 2),), (2,), sample=False)
    plain = decoding({0: (2,)})
    for step in (
        structs.replace(plain, ops=(Free(0, 3),)),
        structs.replace(plain, forwards=(*plain.forwards, chunk)),
        plain,
        plain,
    ):
        spec.draft({one: 10})
        spec.observe(step, {0: [5]}, [commit], 0.5, 0.1)
    assert comparison.drafted.tokens + comparison.plain.tokens == 1


def test_requests_that_refuse_drafts_are_not_compared():
    comparison = Comparison(1)
    recorder = Compared({0: [7]})
    spec = Speculator(recorder, recorder, SpecMeter("test"), VOCAB, comparison)
    refusing = row(0, [1, 2], most_drafts=0)
    for _ in range(4):
        assert spec.draft({refusing: 0}) == {}
        spec.observe(decoding({0: (2,)}), {0: [7]}, [Commit(seq=0, tokens=(7,), computed=3, kv_len=3)], 0.5, 0.1)
    assert comparison.drafted.tokens == comparison.plain.tokens == 0
    assert [what for what, *_ in recorder.heard] == ["begin", *["extend"] * 4]
