"""lm-eval on tasks of the test's own, in batches of 32: its scores are those of the answers without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clients.demo_server import KEY, SERVED, post

BATCH = 32
N_DOCS = 40  # with two choices each: two whole batches and a part of one
PLACES = ("sea", "market", "forest", "king", "mill")
CHOICE = """\
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {docs}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ANSWER = """\
task: answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {docs}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 8}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def documents() -> list[dict[str, Any]]:
    """Questions with two choices each, of which no rule says which one is likelier."""
    docs = []
    for i in range(N_DOCS):
        first, second = PLACES[i % len(PLACES)], PLACES[(i + 1 + i // len(PLACES) % 4) % len(PLACES)]
        question = f"Once upon a time {i} travellers went to the"
        docs.append({"question": question, "choices": [first, second], "answer": i % 2})
    return docs


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tasks")
    docs = folder / "docs.jsonl"
    docs.write_text("".join(json.dumps(document) + "\n" for document in documents()))
    (folder / "choice.yaml").write_text(CHOICE.format(docs=docs))
    (folder / "answer.yaml").write_text(ANSWER.format(docs=docs))
    return folder


@pytest.fixture
def evaluate(run, tasks, server, tmp_path):
    """Run tasks: `evaluate("local-completions", "completions", "choice")` -> (process, samples by task)."""

    def start(model: str, path: str, names: str, *words: str, key: str = KEY):
        arguments = f"model={SERVED},base_url={server.base_url}/{path},num_concurrent=2,auth_token={KEY}"
        ended = run(
            "lm-eval",
            *("lm-eval", "run", "--model", model, "--model_args", arguments, "--tasks", names),
            *("--include_path", str(tasks), "--batch_size", str(BATCH)),
            *("--output_path", str(tmp_path), "--log_samples", *words),
            OPENAI_API_KEY=key,
        )
        samples = {
            name: sorted(
                (json.loads(line) for file in tmp_path.rglob(f"samples_{name}_*") for line in file.open()),
                key=lambda sample: sample["doc_id"],
            )
            for name in names.split(",")
        }
        return ended, samples

    return start


def likelihood(server, context: str, continuation: str) -> float:
    """The log-probability of a continuation, of an echoed prompt."""
    answer = post(server, "completions", prompt=context + continuation, max_tokens=1, echo=True, logprobs=1)
    scored = answer["choices"][0]["logprobs"]
    pairs = zip(scored["token_logprobs"][:-1], scored["text_offset"][:-1], strict=True)
    return sum(logprob for logprob, offset in pairs if offset >= len(context))


def test_likelihoods_and_answers_in_batches(evaluate, server):
    ended, samples = evaluate("local-completions", "completions", "choice,answer")
    assert ended.returncode == 0, ended.stderr
    docs = documents()
    assert [len(found) for found in samples.values()] == [N_DOCS, N_DOCS]
    for document, choice, answer in zip(docs, samples["choice"], samples["answer"], strict=True):
        wanted = [likelihood(server, document["question"], f" {text}") for text in document["choices"]]
        found = [float(logprob) for ((logprob, _),) in choice["resps"]]
        assert found == pytest.approx(wanted, abs=0.01)  # the sums of a batch round otherwise
        asked = {"prompt": document["question"], "max_tokens": 8, "temperature": 0, "stop": ["."]}
        assert answer["resps"] == [[post(server, "completions", **asked)["choices"][0]["text"]]]


def test_chats(evaluate, server):
    ended, samples = evaluate("local-chat-completions", "chat/completions", "answer", "--apply_chat_template")
    assert ended.returncode == 0, ended.stderr
    for document, answer in zip(documents(), samples["answer"], strict=True):
        asked = {"messages": [{"role": "user", "content": document["question"]}], "max_tokens": 8, "temperature": 0}
        choice = post(server, "chat/completions", stop=["."], **asked)["choices"][0]
        assert answer["resps"] == [[choice["message"]["content"]]]


def test_a_refusal_is_shown_with_its_message(evaluate):
    ended, _ = evaluate("local-completions", "completions", "choice", "--limit", "2", key="wrong")
    assert ended.returncode != 0
    assert "401" in ended.stderr and "Incorrect API key provided." in ended.stderr
