"""Limits of keys, the budget of retries, and what is read of bodies."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from phalanx.errors import InvalidRequest, RateLimited
from phalanx.gateway.dispatch.breaker import BreakerRules
from phalanx.gateway.dispatch.replica import Replica
from phalanx.gateway.dispatch.replica_health import Check, HealthRules
from phalanx.gateway.dispatch.replica_models import cards_in, merged, merged_tags, model_meant, names_in, tags_in
from phalanx.gateway.dispatch.retries import CLIENTS, MAX_RETRIES, PER_SECOND, RetryBudget, RetryBudgets, pause
from phalanx.gateway.relay.body_peek import peek, tokens_of, usage_in, with_model
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.gateway.settings.key_limits import KeyLimits, KeyMeter, KeyUse
from phalanx.gateway.settings.replicas_file import ReplicaSpec

# Keys ------------------------------------------------------------------------------------------------------------


def test_requests_at_once():
    meter = KeyMeter({"a": KeyLimits(max_in_flight=2)})
    first, _ = meter.begin("a", 0.0), meter.begin("a", 0.0)
    with pytest.raises(RateLimited, match="2 requests at once"):
        meter.begin("a", 0.0)
    meter.begin("b", 0.0)  # has no limits
    meter.end(first, 0, 0.0)
    meter.begin("a", 0.0)


def test_each_answer_counts_as_a_request_at_once():
    """Else one request with `n` of 128 takes all places that the replicas have."""
    meter = KeyMeter({"a": KeyLimits(max_in_flight=4)})
    first, second = meter.begin("a", 0.0), meter.begin("a", 0.0)
    with pytest.raises(InvalidRequest, match=r"4 requests at once\. Each answer counts as one; this one asks for 5"):
        meter.reserve(first, 0, 0.0, rows=5)
    meter.reserve(first, 0, 0.0, rows=3)
    with pytest.raises(RateLimited, match="4 requests at once"):
        meter.reserve(second, 0, 0.0, rows=2)
    meter.reserve(second, 0, 0.0)
    with pytest.raises(RateLimited):
        meter.begin("a", 0.0)
    meter.end(first, 0, 0.0)
    meter.reserve(third := meter.begin("a", 0.0), 0, 0.0, rows=3)
    for use in (second, third):
        meter.end(use, 0, 0.0)
    assert not meter._in_flight
    other = meter.begin("b", 0.0)  # has no limits
    meter.reserve(other, 0, 0.0, rows=128)


def test_requests_a_minute():
    meter = KeyMeter({"a": KeyLimits(requests_per_minute=60)})
    for _ in range(60):
        meter.end(meter.begin("a", 0.0), 0, 0.0)
    with pytest.raises(RateLimited, match="60 requests a minute") as refused:
        meter.begin("a", 0.5)
    assert refused.value.retry_after == pytest.approx(0.5)
    meter.begin("a", 1.0)


def test_tokens_are_reserved_so_that_requests_at_the_same_time_see_each_others():
    meter = KeyMeter({"a": KeyLimits(tokens_per_minute=600)})
    first, second, third = (meter.begin("a", 0.0) for _ in range(3))
    meter.reserve(first, 400, 0.0)
    with pytest.raises(RateLimited, match="600 tokens a minute; there is no room now for some 300") as refused:
        meter.reserve(second, 300, 0.0)
    assert refused.value.retry_after == pytest.approx(10)  # 100 tokens at ten a second
    meter.end(second, 0, 0.0)
    meter.reserve(third, 200, 0.0)
    with pytest.raises(RateLimited) as refused:
        meter.begin("a", 0.0)
    assert refused.value.retry_after == pytest.approx(0.1)
    meter.end(first, 50, 0.0)
    meter.end(third, 200, 0.0)  # 350 are left
    meter.reserve(meter.begin("a", 0.0), 350, 0.0)


def test_what_an_answer_took_beyond_what_was_reserved_has_to_come_back_first():
    meter = KeyMeter({"a": KeyLimits(tokens_per_minute=600)})
    use = meter.begin("a", 0.0)
    meter.reserve(use, 256, 0.0)
    meter.end(use, 900, 0.0)
    with pytest.raises(RateLimited) as refused:
        meter.begin("a", 0.0)
    assert refused.value.retry_after == pytest.approx(30.1)  # 301 tokens at ten a second
    meter.begin("a", 30.2)


def test_a_request_of_more_than_a_minutes_tokens_gets_a_whole_minutes():
    meter = KeyMeter({"a": KeyLimits(tokens_per_minute=600)})
    small, large = meter.begin("a", 0.0), meter.begin("a", 0.0)
    meter.reserve(small, 1, 0.0)
    with pytest.raises(RateLimited) as refused:
        meter.reserve(large, 1000, 0.0)
    assert refused.value.retry_after == pytest.approx(0.1)
    meter.reserve(large, 1000, 0.2)
    meter.end(large, 1000, 0.2)
    with pytest.raises(RateLimited):
        meter.begin("a", 40.0)
    meter.begin("a", 41.0)


def test_other_limits_hold_from_then_on():
    meter = KeyMeter({"a": KeyLimits(max_in_flight=1, tokens_per_minute=600)})
    use = meter.begin("a", 0.0)
    meter.reserve(use, 600, 0.0)
    meter.set_limits({"a": KeyLimits(max_in_flight=2, tokens_per_minute=60)})
    other = meter.begin("a", 0.0)
    meter.reserve(other, 60, 0.0)
    meter.end(use, 0, 0.0)  # what it gives back is not of the new allowance
    with pytest.raises(RateLimited, match="60 tokens a minute"):
        meter.begin("a", 0.0)
    meter.set_limits({})
    meter.begin("a", 0.0)


def test_nothing_is_kept_of_keys_that_are_gone():
    """Keys may be replaced every day, for as long as a gateway runs."""
    limits = KeyLimits(requests_per_minute=1, tokens_per_minute=1)
    meter = KeyMeter({"a": limits, "b": limits})
    for owner in ("a", "b"):
        meter.end(meter.begin(owner, 0.0), 1, 0.0)
    meter.set_limits({"b": limits})
    assert set(meter._requests) == set(meter._tokens) == {"b"}
    with pytest.raises(RateLimited):
        meter.begin("b", 1.0)


@examples(50, soak=2000)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 400), st.integers(0, 400), st.booleans()), max_size=60))
def test_no_key_gets_more_than_its_rate(steps):
    """Whatever it asks for, and however many at once: in any time at most a minute's worth, plus what the time brings,
    plus what answers took beyond what was reserved for them."""
    meter, now, used, beyond = KeyMeter({"a": KeyLimits(tokens_per_minute=600)}), 0.0, 0, 0
    running: list[tuple[KeyUse, int]] = []
    for seconds, reserved, tokens, ends in steps:
        now += seconds
        try:
            use = meter.begin("a", now)
        except RateLimited:
            continue
        try:
            meter.reserve(use, reserved, now)
        except RateLimited:
            meter.end(use, 0, now)
            continue
        used, beyond = used + tokens, beyond + max(0, tokens - reserved)
        running.append((use, tokens))
        if ends:
            while running:
                meter.end(*running.pop(), now)
        assert used - beyond <= 600 + now * 10 + 1e-6


# Retries ---------------------------------------------------------------------------------------------------------


def test_the_budget_is_a_share_of_requests_and_some_a_second():
    budget = RetryBudget(0.2)
    assert sum(budget.take(0.0) for _ in range(1000)) == MAX_RETRIES
    for _ in range(50):
        budget.note_request()
    assert sum(budget.take(0.0) for _ in range(1000)) == pytest.approx(10, abs=1)  # floats: 50 times 0.2
    assert sum(budget.take(2.0) for _ in range(1000)) == pytest.approx(2 * PER_SECOND, abs=1)


def test_one_client_cannot_spend_the_retries_of_another_and_few_are_remembered():
    budgets = RetryBudgets(0.2)
    while budgets.of("greedy").take(0.0):
        pass
    assert budgets.of("modest").take(0.0) and not budgets.of("greedy").take(0.0)
    for n in range(CLIENTS):
        budgets.of(f"client {n}")
    assert len(budgets._of) == CLIENTS


def test_pauses_grow_up_to_the_longest():
    config = GatewayConfig(retry_max_backoff_ms=1000.0, retry_backoff_multiplier=2.0)
    found = [pause(config, n, lambda: 0.5) for n in (1, 2, 3, 99, 10**6)]
    assert found == pytest.approx([0.05, 0.1, 0.2, 1.0, 1.0])
    assert pause(config, 1, lambda: 1.0) == pytest.approx(0.06) and pause(config, 1, lambda: 0.0) == pytest.approx(0.04)


HOSTILE = [
    b'{"usage": ' + b"[" * 100_000,
    b'{"model": ' + b'{"data": ' * 100_000,
    b'{"model": "\xff", "data": [{"id": "\xff"}]}',
]
"""Nested deeper than the stack, or no UTF-8."""

# Bodies ----------------------------------------------------------------------------------------------------------


def test_what_is_read_of_a_body():
    seen = peek(b'{"model": "m", "prompt_cache_key": "k", "messages": [{"a": 1}], "unknown": {"x": []}}')
    assert (seen.model, seen.prompt_cache_key, bytes(seen.messages)) == ("m", "k", b'[{"a": 1}]')
    assert b"".join(seen.prompt_parts) == b'[{"a": 1}]'
    assert peek(b"{}").model is None


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (b"{}", 1),
        (b'{"n": 3}', 3),
        (b'{"n": 1000, "prompt": "a"}', 1),
        (b'{"n": 999}', 128),
        (b'{"n": 0, "prompt": []}', 1),
        (b'{"n": "3"}', 1),
        (b'{"n": 2, "prompt": [ "a", "b"]}', 4),
        (b'{"n": null, "prompt": [[1], [2], [3]]}', 3),
        (b'{"n": 2, "prompt": [1, 2, 3]}', 2),
        (b'{"prompt": [' + b" " * 70_000 + b'"a", "b,c"]}', 2),
        (b'{"prompt": ["' + b"x, " * 70_000 + b'", "b"]}', 2),
        (b'{"prompt": [' + b"1, " * 70_000 + b"1]}", 1),
        (b'{"prompt": [' + b'"", ' * 70_000 + b'""]}', 128),
        (b'{"prompt": [' + b"[1], " * 70_000 + b"[1]]}", 128),
    ],
)
def test_rows_are_choices_of_each_prompt(body, rows):
    assert peek(body).rows == rows


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b"{}", 256),
        (b'{"max_tokens": 10}', 10),
        (b'{"max_tokens": 10, "n": 3}', 30),
        (b'{"max_completion_tokens": 7, "max_tokens": 99}', 7),
        (b'{"max_output_tokens": 9}', 9),
        (b'{"max_tokens": 99999, "n": 2, "prompt": ["a", "b"]}', 1024),
        (b'{"max_tokens": -1}', 256),
        (b'{"max_tokens": null, "max_output_tokens": 1e9}', 256),
        (b'{"max_tokens": 1' + b"0" * 5000 + b"}", 256),
        (b'{"options": {"seed": 1, "num_predict": 9}}', 9),
        (b'{"max_tokens": 8, "options": {"num_predict": 9}}', 8),
        (b'{"options": {"num_predict": -1}}', 256),  # Ollama's for no limit
        (b'{"options": {"num_predict": "9"}}', 256),
        (b'{"options": [9]}', 256),
        (b'{"options": null}', 256),
        (b'{"options": {"num_predict": 9, "x": "' + b"x" * 70_000 + b'"}}', 256),
    ],
)
def test_tokens_that_answers_are_expected_to_have(body, tokens):
    assert peek(body).answer_tokens == tokens


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"{", b'{"model": 3}', b'{"messages": [}', b"\xff{}", *HOSTILE])
def test_what_cannot_be_routed_is_refused(body):
    with pytest.raises(InvalidRequest):
        peek(body)


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        (b"[]", "The JSON body must be an object.", None),
        (b'{"model": 3}', "Invalid type for 'model'", "model"),
        (b'{"prompt_cache_key": []}', "Invalid type for 'prompt_cache_key'", "prompt_cache_key"),
    ],
)
def test_a_refusal_names_the_field_as_a_server_does(body, said, param):
    with pytest.raises(InvalidRequest, match=said) as refused:
        peek(body)
    assert refused.value.param == param


def test_a_byte_order_mark_is_passed_over():
    body = b'\xef\xbb\xbf{"model": "m"}'
    assert peek(body).model == "m" and with_model(body, peek(body), "n") == b'{"model":"n"}'


def test_a_body_of_nothing_but_names_is_not_written_anew():
    wide = b'{"model": "m", ' + b",".join(b'"%d":0' % i for i in range(70_000)) + b"}"
    with pytest.raises(InvalidRequest, match="70001 names"):
        with_model(wide, peek(wide), "n")
    prompt = b'{"model": "m", "messages": [' + b",".join([b'{"a":0}'] * 70_000) + b"]}"
    assert with_model(prompt, peek(prompt), "n").startswith(b'{"model":"n","messages":[{"a":0},')


def test_another_model_changes_nothing_else():
    body = b'{"seed": 12345678901234567890, "model": "gpt-4o", "x": 1.10, "messages": ["\\u00e9 \xc3\xa9"]}'
    changed = with_model(body, peek(body), "demo")
    assert json.loads(changed) == {**json.loads(body), "model": "demo"}
    assert b"12345678901234567890" in changed and b"1.10" in changed and b'"\\u00e9 \xc3\xa9"' in changed


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        (b'{"total_tokens": 9}', 9),
        (b'{"prompt_tokens": 3, "completion_tokens": 4}', 7),
        (b'{"input_tokens": 3, "output_tokens": 5}', 8),
        (b'{"input_tokens": 3, "output_tokens": 5, "cache_read_input_tokens": 70}', 78),  # Messages: the prompt's rest
        (b'{"input_tokens": 3, "output_tokens": 5, "cache_creation_input_tokens": null}', 8),
        (b'{"prompt_eval_count": 3, "eval_count": 6}', 9),
        (b'{"output_tokens": 5}', None),
        (b'{"total_tokens": -5}', None),
        (b'{"total_tokens": 1' + b"0" * 400 + b"}", None),  # a key's allowance minus this cannot be compared again
        (b"null", None),
        (b"", None),
    ],
)
def test_tokens_of_every_dialect(usage, tokens):
    assert tokens_of(usage) == tokens


def test_usage_of_a_whole_answer():
    assert tokens_of(usage_in(b'{"usage": {"total_tokens": 4}, "choices": []}')) == 4
    ollama = b'{"model": "m", "response": "abc", "done": true, "prompt_eval_count": 3, "eval_count": 300}'
    assert tokens_of(usage_in(ollama)) == 303
    assert tokens_of(usage_in(b'{"done": true, "eval_count": 300}')) == 300, "the whole prompt was cached"
    assert tokens_of(usage_in(b'{"usage": null, "eval_count": "x"}')) is None
    assert usage_in(b"[]") == usage_in(b"not JSON") == usage_in(HOSTILE[0]) == b""


# Models ----------------------------------------------------------------------------------------------------------


def test_models_of_all_replicas_are_one_list():
    found = []
    for name, ids in (("a", ("m", "n")), ("b", ("n", "o:latest"))):
        one = Replica(ReplicaSpec(name=name, url=f"http://{name}"), HealthRules(), BreakerRules())
        one.cards = [{"id": id, "owned_by": name} for id in ids]
        found.append(one)
    cards = merged(found, {"gpt": "n", "gone": "x"})
    assert [(card["id"], card["owned_by"]) for card in cards] == [
        ("m", "a"), ("n", "a"), ("o:latest", "b"), ("gpt", "a")
    ]  # fmt: skip
    assert "o" in names_in(found[1].cards)
    assert cards_in(b'{"data": [{"id": "m"}, {"id": 3}]}') == [{"id": "m"}]
    assert cards_in(b"<html>") is None and cards_in(b'{"data": 3}') is None
    assert all(cards_in(body) is None for body in HOSTILE[1:])


def test_ollamas_lists_are_one():
    a, b = (
        tags_in(b'{"models": [{"name": "m:latest", "size": 1}, {"name": 3}]}'),
        tags_in(b'{"models": [{"name": "m"}]}'),
    )
    tags = merged_tags([a, b, tags_in(b'{"models": [{"name": "n:7b"}]}')], {"gpt": "n:7b", "x": "m", "gone": "o"})
    assert tags == [
        {"name": "m:latest", "size": 1},
        {"name": "n:7b"},
        {"name": "gpt", "model": "gpt"},
        {"name": "x", "model": "x", "size": 1},
    ]
    assert all(tags_in(body) == [] for body in (b"<html>", b'{"models": 3}', *HOSTILE[1:]))


def test_ollamas_tag_may_be_there_or_not():
    one = Replica(ReplicaSpec(name="a", url="http://a"), HealthRules(), BreakerRules())
    one.models = names_in([{"id": "demo"}, {"id": "llama3:latest"}, {"id": "qwen:7b"}])
    served = ("demo", "demo:latest", "llama3", "llama3:latest", "qwen:7b")
    assert all(map(one.serves, served)) and not any(map(one.serves, ("qwen", "qwen:latest", "demo:7b", "de")))


def test_a_name_in_another_case_is_the_one_that_a_replica_knows():
    one, other = (Replica(ReplicaSpec(name=name, url=f"http://{name}"), HealthRules(), BreakerRules()) for name in "ab")
    one.models = names_in([{"id": "demo"}, {"id": "Llama3:latest"}])
    aliases = {"gpt-4o": "demo"}
    for asked, meant in (
        ("demo", "demo"), ("DEMO:latest", "demo"), ("llama3", "Llama3"), ("Llama3:latest", "Llama3:latest"),
        ("GPT-4o:latest", "demo"), ("x", "x"),
    ):  # fmt: skip
        assert model_meant(asked, [one, other], aliases) == meant
    other.health.note(Check(ok=True), 0.0, 0.0)  # it is up, and does not say what it serves: "DEMO" may be its own
    assert model_meant("DEMO", [one, other], aliases) == "DEMO"
    assert model_meant("gpt-4o", [one, other], aliases) == "demo"
