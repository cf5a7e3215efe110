"""The page's files: small, whole, from here alone, and with a policy that lets no other script run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.http.web_page import FILES, POLICY, files

MAX_BYTES = 120 * 1024
NAMES = sorted(files())


def text(name: str) -> str:
    return files()[name].body.decode()


def test_the_page_is_small() -> None:
    assert sum(len(answer.body) for answer in files().values()) < MAX_BYTES


def test_every_file_of_the_folder_is_served() -> None:
    assert set(NAMES) == {file.name for file in FILES.iterdir()}


@pytest.mark.parametrize("name", NAMES)
def test_files_name_only_files_that_are_there(name: str) -> None:
    named = re.findall(r'(?:src|href)="page/([^"]+)"|from "\./([^"]+)"', text(name))
    assert {one or other for one, other in named} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", text(name)))
    assert addresses <= {"http://www.w3.org"}  # the name of SVG


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".js")])
def test_no_script_makes_markup_of_text(name: str) -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function|createContextual"
    assert not re.search(forbidden, text(name))


def test_no_script_and_no_style_stands_in_the_document() -> None:
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", text("index.html"))


def test_the_policy_lets_nothing_else_in() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in POLICY.split(";"))
    assert rules["default-src"] == "'none'" and rules["script-src"] == rules["connect-src"] == "'self'"
    assert all("unsafe" not in rule and "*" not in rule for rule in rules.values())
    assert all(answer.headers["Content-Security-Policy"] == POLICY for answer in files().values())


def test_the_wheel_has_the_files() -> None:
    root = Path(__file__).parents[3]
    assert '"http/page/*"' in (root / "pyproject.toml").read_text()
