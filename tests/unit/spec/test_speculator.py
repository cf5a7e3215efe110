"""What the drafter and the control are told, and when: commits and nothing else (A2)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import structs
from support.drafts import by_position

from phalanx.sched.plan import Commit, Forward, Free, Step
from phalanx.sched.sequence import Sequence as Row
from phalanx.spec.adaptive import AdaptiveControl
from phalanx.spec.comparison import Comparison
from phalanx.spec.control import DraftPrefill, StepTime, share_out
from phalanx.spec.drafters import Draft, Drafter, RandomDrafter
from phalanx.spec.rules import Always
from phalanx.spec.speculator import Speculator
from phalanx.spec.stats import SpecMeter
from phalanx.types import Sampling, SequenceRequest, StopRule

VOCAB = 100


class Recorder(Always, Drafter):
    """A drafter and a control that write down what they are told."""

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
        return {key: by_position(self.drafts[key][:n]) for key, n in wanted.items() if key in self.drafts}

    def observe(
        self, committed: Mapping[int, Sequence[int]], verified: Mapping[int, int], time: StepTime | None
    ) -> int:
        tokens = {key: list(tokens) for key, tokens in committed.items()}
        if time is None:
            self.heard.append(("pending", tokens))
        else:
            self.heard.append(("observe", tokens, dict(verified), time.step_s, time.drafting_s))
        return 0


def row(number: int, tokens: list[int], max_drafts: int | None = None) -> Row:
    stop = StopRule(max_tokens=50)
    request = SequenceRequest(
        id=str(number),
        group="g",
        prompt=tokens,
        sampling=Sampling(),
        stop=stop,
        owner="key",
        max_drafts=max_drafts,
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
    assert spec.draft({row(0, [1, 2]): 10}, overlapped=False) == {0: [7, 8]}
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
    assert spec.draft({row(n, [1]): 10 for n in range(4)}, overlapped=False) == {0: [7], 2: [5]}


def test_rows_without_room_are_followed_but_not_drafted_for():
    spec, recorder = speculator({0: [7]})
    assert spec.draft({row(0, [1]): 0}, overlapped=False) == {}
    assert recorder.heard == [("begin", 0, [1], "key")]


def test_steps_whose_requests_all_refuse_drafts_are_only_learned_from():
    """They neither cost nor earn what the control may spend on others."""
    spec, recorder = speculator({0: [7]})
    commit = Commit(seq=0, tokens=(7,), computed=3, kv_len=3)
    refusing = row(0, [1, 2], max_drafts=0)
    assert spec.draft({refusing: 0}, overlapped=False) == spec.draft({refusing: 0}, overlapped=True) == {}
    spec.observe(decoding({0: (2,)}), {0: [7]}, [commit], 0.5, 0.1)
    assert recorder.heard == [("begin", 0, [1, 2], "key"), ("extend", 0, [7])]
    spec.draft({refusing: 0, row(1, [1]): 5}, overlapped=False)
    spec.observe(decoding({0: (7,)}), {0: [8]}, [], 0.5, 0.1)
    assert recorder.heard[-1][0] == "observe"


def test_what_was_committed_is_the_history_not_what_was_verified():
    """A stop id clips accepted drafts away: they count as accepted, and no drafter learns from them."""
    spec, recorder = speculator({0: [7, 8]})
    spec.draft({row(0, [1, 2]): 10}, overlapped=False)
    commit = Commit(seq=0, tokens=(7,), computed=4, kv_len=2, finish="stop", stop_id=7)
    spec.observe(decoding({0: (2, 7, 8)}), {0: [7, 8, 9]}, [commit], 0.5, 0.1)
    assert recorder.heard[1] == ("extend", 0, [7])
    assert spec.meter.stats().accepted == 2


class Reader(RandomDrafter):
    """A model, as far as reading goes."""

    def __init__(self, unread: dict[int, int]) -> None:
        super().__init__(VOCAB)
        self.left = unread
        self.reads: list[dict[int, int]] = []

    computes = True

    def unread(self, keys: Iterable[int]) -> dict[int, int]:
        return {key: self.left[key] for key in keys if self.left.get(key)}

    def read(self, tokens: Mapping[int, int]) -> int:
        self.reads.append(dict(tokens))
        for key, n in tokens.items():
            self.left[key] -= n
        return sum(tokens.values())


class Slow(Always):
    """Has ten tokens read in a step."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.times: list[StepTime | None] = []

    def request(
        self, room: Mapping[int, int], unread: Mapping[int, DraftPrefill], *, overlapped: bool
    ) -> dict[int, int]:
        return super().request(room, {}, overlapped=overlapped) | share_out(unread, 10)

    def observe(
        self, committed: Mapping[int, Sequence[int]], verified: Mapping[int, int], time: StepTime | None
    ) -> int:
        self.times.append(time)
        return 0


def test_what_is_unread_is_read_first_and_not_drafted_for():
    """Ten tokens a step; a sequence of which no draft is of use is not read."""
    drafter = Reader({0: 15, 1: 30})
    spec = Speculator(drafter, Slow(1), SpecMeter("test"), VOCAB)
    rows = {row(0, [1]): 5, row(1, [1]): 0, row(2, [1]): 5}
    assert [spec.draft(rows, overlapped=False).keys() for _ in range(3)] == [{2}, {2}, {0, 2}]
    assert drafter.reads == [{0: 10}, {0: 5}]


def test_a_prompt_is_read_while_the_target_prefills_it():
    """What was read before the first decoding step is told with it."""
    drafter, control = Reader({0: 15}), Slow(1)
    one = row(0, [1, 2])
    prefilling = [one, row(1, [3], max_drafts=0)]
    spec = Speculator(drafter, control, SpecMeter("test"), VOCAB, 99, lambda: prefilling)
    assert spec.draft({}, overlapped=False) == spec.draft({}, overlapped=False) == {}
    assert drafter.reads == [{0: 10}, {0: 5}]
    prefilling.clear()
    assert spec.draft({one: 5}, overlapped=False).keys() == {0}
    spec.observe(decoding({0: (2,)}), {0: [7]}, [Commit(seq=0, tokens=(7,), computed=3, kv_len=3)], 0.5, 0.1)
    (time,) = control.times
    assert time is not None and time.tokens_read == 15 and time.reading_s > 0 and time.step_s == 0.5


def test_with_more_rows_than_configured_nothing_is_drafted():
    recorder = Recorder({0: [7, 8], 1: [7, 8]})
    spec = Speculator(recorder, recorder, SpecMeter("test"), VOCAB, 1)
    one, two = row(0, [1]), row(1, [1])
    assert spec.draft({one: 10}, overlapped=False) == {0: [7, 8]} and not spec.can_overlap([0])
    assert spec.draft({one: 10, two: 10}, overlapped=False) == {} and spec.can_overlap([0, 1])


def test_reading_is_not_counted_as_drafting():
    spec, recorder = speculator({0: [7, 8]})
    spec.draft({row(0, [1, 2]): 10}, overlapped=False)
    spec._read_s = 0.0625
    spec.observe(decoding({0: (2,)}), {0: [7]}, [Commit(seq=0, tokens=(7,), computed=3, kv_len=3)], 0.5, 0.125)
    assert recorder.heard[-1][3:] == (0.4375, 0.0625)


def test_what_a_step_took_is_not_handed_on_where_rows_were_moved_as_well():
    spec, recorder = speculator({0: [7, 8]})
    spec.draft({row(0, [1, 2]): 10}, overlapped=False)
    step = structs.replace(decoding({0: (2, 7, 8)}), ops=(Free(0, 3),))
    spec.observe(step, {0: [7, 9]}, [Commit(seq=0, tokens=(7, 9), computed=4, kv_len=3)], 0.5, 0.1)
    assert recorder.heard[-1] == ("observe", {0: [7, 9]}, {0: 2}, None, 0.1)


def test_what_a_step_took_is_not_handed_on_where_it_says_nothing_about_others():
    spec, recorder = speculator({0: [7, 8]})
    spec.draft({row(0, [1, 2]): 10}, overlapped=False)
    commit = Commit(seq=0, tokens=(7, 9), computed=4, kv_len=3)
    spec.observe(decoding({0: (2, 7, 8)}), {0: [7, 9]}, [commit], None, 0.1)
    assert recorder.heard[-1] == ("observe", {0: [7, 9]}, {0: 2}, None, 0.1)


def test_a_step_that_only_prefills_is_not_observed():
    spec, recorder = speculator({})
    step = Step(id=1, commits=(), ops=(), forwards=(Forward(0, 0, (3,), ((1, 2),), (2,), sample=False),), digest=0)
    spec.observe(step, {}, [Commit(seq=3, tokens=(), computed=2, kv_len=2)], 0.5, 0.1)
    assert recorder.heard == []
    assert spec.meter.stats().steps == 0


def test_steps_are_skipped_while_the_control_backs_off():
    """The drafter learns the commits all the same; another sequence ends the backoff."""

    class Backs(Recorder):
        def observe(
            self, committed: Mapping[int, Sequence[int]], verified: Mapping[int, int], time: StepTime | None
        ) -> int:
            assert time is not None
            self.heard.append(("observe", sorted(committed), time.skipped))
            return 3

    def step(rows: Mapping[int, Row]) -> dict[int, list[int]]:
        drafts = spec.draft(dict.fromkeys(rows.values(), 10), overlapped=False)
        spec.can_overlap(rows)
        commits = [Commit(seq=number, tokens=(5,), computed=3, kv_len=3) for number in rows]
        spec.observe(decoding(dict.fromkeys(rows, (2,))), {number: [5] for number in rows}, commits, 0.5, 0.1)
        return drafts

    def told() -> list[object]:
        found = [event for event in control.heard if event[0] == "observe"]
        control.heard.clear()
        return [event[1:] for event in found]

    control = Backs({0: [7, 8]})
    spec = Speculator(control, control, SpecMeter("test"), VOCAB)
    one, two = row(0, [1, 2]), row(1, [1])
    assert step({0: one}) == {0: [7, 8]}
    assert told() == [([0], 0)]
    assert [step({0: one}) for _ in range(3)] == [{}] * 3
    assert control.heard == [("extend", 0, [5])] * 3 and told() == []
    assert step({0: one}) == {0: [7, 8]} and told() == [([0], 3)]
    assert step({0: one}) == {} and told() == []
    assert step({0: one, 1: two}) == {0: [7, 8]} and told() == [([0, 1], 1)]


def test_an_overlapped_step_still_compares_what_a_lookup_finds():
    class Compares(Recorder):
        def request(
            self, room: Mapping[int, int], unread: Mapping[int, DraftPrefill], *, overlapped: bool
        ) -> dict[int, int]:
            return dict.fromkeys(room, 2)

        def choose(self, drafts: Mapping[int, Draft]) -> dict[int, int]:
            self.heard.append(("choose", {key: draft.tokens for key, draft in drafts.items()}))
            return {}

    control = Compares({0: [7, 8]})
    spec = Speculator(control, control, SpecMeter("test"), VOCAB)
    assert spec.draft({row(0, [1, 2]): 10}, overlapped=True) == {}
    assert control.heard == [("begin", 0, [1, 2], "key"), ("choose", {0: [7, 8]})]


def test_a_model_is_not_asked_in_an_overlapped_step():
    class Model(Recorder):
        computes = True

        def draft(self, wanted: Mapping[int, int]) -> dict[int, Draft]:
            assert wanted or not self.drafts
            return super().draft(wanted)

    model = Model({0: [7, 8]})
    spec = Speculator(model, AdaptiveControl(4, cheap=False), SpecMeter("test"), VOCAB)
    model.drafts = {}
    assert spec.draft({row(0, [1, 2]): 10}, overlapped=True) == {}
    model.drafts = {0: [7, 8]}
    assert spec.draft({row(0, [1, 2]): 10}, overlapped=False) == {}  # nothing is known of the machine
    assert model.heard == [("begin", 0, [1, 2], "key")]


class Compared(Recorder):
    def can_overlap(self, keys: Collection[int]) -> bool:
        self.heard.append(("can overlap",))
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
    spec = Speculator(recorder, recorder, SpecMeter("test", comparison=comparison), VOCAB)
    one = row(0, [1, 2])

    def step(token: int) -> dict[int, list[int]]:
        drafts = spec.draft({one: 10}, overlapped=False)
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
        ("step",), ("can overlap",),
        ("extend", 0, [12]), ("pending", {0: [12]}), ("extend", 0, [13]), ("pending", {0: [13]}),
        ("step",), ("can overlap",), ("extend", 0, [14]), observed[1],
    ]  # fmt: skip
    assert comparison.totals[True][0] == 1 and comparison.totals[False][0] == 2  # the last one is not over


def test_of_those_that_ended_while_nothing_was_drafted_no_drafter_is_told():
    recorder = Compared({})
    spec = Speculator(recorder, recorder, SpecMeter("test", comparison=Chosen([True, True, False, True])), VOCAB)
    one, two = row(0, [1, 2]), row(1, [3])
    spec.draft({one: 10, two: 10}, overlapped=False)
    spec.draft({one: 10, two: 10}, overlapped=False)
    commits = [Commit(seq=number, tokens=(5,), computed=3, kv_len=3) for number in (0, 1)]
    spec.observe(decoding({0: (2,), 1: (2,)}), {0: [5], 1: [5]}, commits, 0.5, 0.1)
    spec.keep({1})
    spec.draft({two: 10}, overlapped=False)
    assert recorder.heard[2:] == [("end", 0), ("end", 0), ("extend", 1, [5]), ("pending", {1: [5]})]


def test_a_sequence_that_began_while_nothing_was_drafted_is_followed_from_its_beginning():
    recorder = Compared({})
    spec = Speculator(recorder, recorder, SpecMeter("test", comparison=Chosen([True, False, True])), VOCAB)
    one = row(0, [1, 2])
    spec.draft({one: 10}, overlapped=False)
    one.tokens.append(5)
    spec.observe(decoding({0: (2,)}), {0: [5]}, [Commit(seq=0, tokens=(5,), computed=3, kv_len=3)], 0.5, 0.1)
    spec.draft({one: 10}, overlapped=False)
    assert recorder.heard == [("begin", 0, [1, 2, 5], "key")]


def test_steps_that_move_rows_or_prefill_are_not_compared():
    recorder = Compared({})
    comparison = Comparison(1)
    spec = Speculator(recorder, recorder, SpecMeter("test", comparison=comparison), VOCAB)
    one, commit = row(0, [1, 2]), Commit(seq=0, tokens=(5,), computed=3, kv_len=3)
    chunk = Forward(0, 0, (3,), ((1, 2),), (2,), sample=False)
    plain = decoding({0: (2,)})
    for step in (
        structs.replace(plain, ops=(Free(0, 3),)),
        structs.replace(plain, forwards=(*plain.forwards, chunk)),
        plain,
        plain,
    ):
        spec.draft({one: 10}, overlapped=False)
        spec.observe(step, {0: [5]}, [commit], 0.5, 0.1)
    assert sum(tokens for tokens, _ in comparison.totals.values()) == 1


def test_requests_that_refuse_drafts_are_not_compared():
    comparison = Comparison(1)
    recorder = Compared({0: [7]})
    spec = Speculator(recorder, recorder, SpecMeter("test", comparison=comparison), VOCAB)
    refusing = row(0, [1, 2], max_drafts=0)
    for _ in range(4):
        assert spec.draft({refusing: 0}, overlapped=False) == {}
        spec.observe(decoding({0: (2,)}), {0: [7]}, [Commit(seq=0, tokens=(7,), computed=3, kv_len=3)], 0.5, 0.1)
    assert comparison.totals == {True: (0, 0.0), False: (0, 0.0)}
    assert [what for what, *_ in recorder.heard] == ["begin", *["extend"] * 4]
