"""ollama: pull with its progress and whole, list, show, delete, and what cannot be pulled."""

import json
import sys

import ollama

base_url, key, name, absent = sys.argv[1:]
client = ollama.Client(host=base_url.removesuffix("/v1"), headers={"Authorization": f"Bearer {key}"})


def names() -> list:
    """Of all models that the server lists."""
    return [entry.model for entry in client.list().models]


def refusal(work) -> str:
    """What the client makes of an error."""
    try:
        work()
    except ollama.ResponseError as error:
        return str(error.error)
    raise AssertionError("not refused")


before = names()
steps = [[step.status, step.digest, step.total, step.completed] for step in client.pull(name, stream=True)]
shown = client.show(name)
report = {
    "before": before,
    "steps": steps,
    "after": names(),
    "again": client.pull(name).status,
    "served": [step.status for step in client.pull(before[0], stream=True)],
    "family": shown.details.family,
    "context": shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"],
    "deleted": client.delete(name).status,
    "left": names(),
    "errors": [
        refusal(lambda: list(client.pull(absent, stream=True))),
        refusal(lambda: client.pull(absent)),
        refusal(lambda: client.delete(absent)),
        refusal(lambda: client.delete(before[0])),
    ],
}
print(json.dumps(report))
