"""guidellm: a benchmark of seconds on synthetic prompts, of chats and of text completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clients.demo_server import KEY, SERVED

from phalanx.demo import MODEL_DIR

REQUESTS = 12
OUTPUT_TOKENS = 16


def benchmark(run, server, tmp_path: Path, route: str) -> dict[str, Any]:
    """The only benchmark in guidellm's report."""
    report = tmp_path / "report.json"
    ended = run(
        "guidellm",
        *("guidellm", "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={server.origin},api_key={KEY},model={SERVED},request_format={route}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={MODEL_DIR}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={report}"),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (found,) = json.loads(report.read_text())["benchmarks"]
    return found


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_benchmark_completes_all_its_requests(run, server, tmp_path, route):
    metrics = benchmark(run, server, tmp_path, route)["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    tokens = metrics["output_token_count"]["successful"]
    assert (tokens["min"], tokens["max"]) == (OUTPUT_TOKENS, OUTPUT_TOKENS)
    assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0
