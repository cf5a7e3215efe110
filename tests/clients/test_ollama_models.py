"""Ollama's own Python client pulls, lists, shows and deletes a model, which a hub on this machine has."""

from __future__ import annotations

import hashlib

from clients.note_server import KEY, SERVED
from support.stub_hub import files_of_a_model, stub_hub

NAME = "owner/tiny"
WEIGHTS = bytes(range(256)) * (25 << 12)


def test_pull_list_show_delete(note_reader, report_of, monkeypatch):
    with stub_hub({NAME: files_of_a_model(WEIGHTS)}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        report = report_of("ollama", "ollama_models.py", note_reader.base_url, KEY, NAME, "owner/none")
    assert report["before"] == report["left"] == [SERVED] and report["after"] == [SERVED, NAME]
    (first, *_), (last, *_) = report["steps"][0], report["steps"][-1]
    assert (first, last) == ("pulling manifest", "success")
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    shares = [step[3] for step in report["steps"] if step[1] == f"sha256:{digest}" and step[2] == len(WEIGHTS)]
    assert shares == sorted(shares) and len(set(shares)) >= 3 and shares[-1] == len(WEIGHTS), "a bar that grows"
    assert (report["family"], report["context"]) == ("llama", 4096)
    assert report["again"] == report["deleted"] == "success"
    assert report["served"] == ["pulling manifest", "success"]
    no_repository, again, not_here, served = report["errors"]
    assert no_repository == again and "the hub has no such repository" in again
    assert "is not on this machine" in not_here and "is served" in served
