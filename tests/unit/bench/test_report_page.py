"""Pages of result files: tables, plots, files that are none, texts that would be HTML or end a cell."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from phalanx.bench.load_generator import OfferedLoad
from phalanx.bench.measurement import figures, settings_json
from phalanx.bench.report_page import COLUMNS, markdown, read, web_page
from phalanx.bench.workload import LoadConfig
from phalanx.errors import ConfigError

RUN = {
    "model_id": "org/model", "completed": 4, "failed": 1, "total_input_tokens": 400, "total_output_tokens": 40,
    "output_throughput": 123.4, "request_throughput": 1.5, "max_concurrency": 2, "request_rate": "inf",
    "median_ttft_ms": 12.34, "p99_ttft_ms": 50.0, "median_tpot_ms": 1.0, "p99_tpot_ms": None, "label": "one",
}  # fmt: skip
COMPARED = {
    "servers": {
        "old": {"model_id": "m", "rounds": [{"output_throughput": 10.0}, {"output_throughput": 30.0}]},
        "new": {"model_id": "m", "rounds": [{"output_throughput": 10.0}, {"output_throughput": 10.0}]},
    },
    "ratios": {"output_throughput": {"ratio": 2.0, "min": 1.0, "max": 3.0}},
}


def files(folder: Path, *contents: Any) -> list[Path]:
    found = []
    for number, content in enumerate(contents):
        file = folder / f"run{number}.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        found.append(file)
    return found


def test_a_run_is_a_line_and_a_comparison_a_table(tmp_path: Path) -> None:
    page = markdown("Title", read(files(tmp_path, RUN, COMPARED)))
    assert page.startswith("# Title\n")
    assert f"| {' | '.join(COLUMNS)} |" in page
    assert "| one | model | 2 | inf | 100 | 10 | 4 | 1 | 12.3 | 50 | 1 |  | 1.5 | 123 |" in page
    assert "| output throughput | 20 | 10 | 2.00 (1.00 .. 3.00) |" in page


def test_what_serve_saves_is_read(tmp_path: Path) -> None:
    saved = settings_json(LoadConfig(request_rate=2.5), "m", None) | figures(OfferedLoad((), ("full",), 0.0))
    page = markdown("T", read(files(tmp_path, saved)))
    assert "| run0 | m |  | 2.5 | 0 | 0 | 0 | 1 |" in page  # no label: the file's name


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    assert "| 4 of 9, interrupted |" in markdown(
        "T", read(files(tmp_path, RUN | {"is_whole": False, "num_prompts": 9}))
    )


def test_texts_of_files_command_neither_a_browser_nor_a_table(tmp_path: Path) -> None:
    found = read(files(tmp_path, RUN | {"label": "<script>a|b\n#"}, RUN | {"label": "<b>", "max_concurrency": 4}))
    page = web_page("<i>", found)
    assert "<script>" not in page and "<b>" not in page and "<i>" not in page and "&lt;script&gt;" in page
    assert "| &lt;script&gt;a\\|b # | model |" in markdown("T", found)


def test_runs_of_different_loads_are_plotted(tmp_path: Path) -> None:
    runs = [RUN | {"max_concurrency": at, "label": label} for at in (1, 2, 16) for label in ("one", "two")]
    page = web_page("T", read(files(tmp_path, *runs)))
    svgs = [
        ET.fromstring(part + "</svg>")
        for part in page.split("</svg>")[:-1]
        for part in ["<svg" + part.split("<svg")[1]]
    ]
    assert len(svgs) == 2  # TTFT and tokens/s
    lines = [one for one in svgs[0].iter() if one.tag.endswith("polyline")]
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 3]
    assert "<svg" not in web_page("T", read(files(tmp_path, RUN)))


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", "{}", "[" * 5000, json.dumps(RUN | {"completed": "x"}), json.dumps(RUN | {"request_rate": []}),
     json.dumps({"ratios": 3}), json.dumps(COMPARED | {"servers": []})],
)  # fmt: skip
def test_a_file_that_is_no_result_is_named(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run0\.json is not a result of `phalanx bench`: ."):
        read(files(tmp_path, content))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file"):
        read([tmp_path / "none.json"])
    file = tmp_path / "bytes.json"
    file.write_bytes(b'{"label": "\xff"}')
    with pytest.raises(ConfigError, match="not a result"):
        read([file])
