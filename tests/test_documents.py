"""Whatever code and documents cite is there: documents, sections, requirement ids, files, and functions.

A checker takes one file and the repository, and yields what is wrong. Checkers are tested on planted dead citations
below, so that none of them can rot into one that never fails. Does not know whether what a page says is true.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import normpath

import pytest
from test_architecture import LAYERS, ROOMS

ROOT = Path(__file__).resolve().parent.parent
TREES = ("src", "tests", "tools", "benchmarks", "docs", "deploy", "native", "examples", ".ci")
NOT_OURS = re.compile(r"(^|/)(__pycache__|build|[^/]*\.egg-info|\.\w+_cache)/")

IDEAS_PAGE = "docs/design.md"
IDS_PAGE = "docs/requirements.md"
ARCHITECTURE = "docs/architecture.md"

PLANTED = ("tests/test_documents.py",)
"""Files whose citations are dead on purpose."""
HISTORY = ("docs/log/", "CHANGELOG.md")
"""Pages that may name files which are not there any more."""
GENERATED = ("docs/errors.md", "docs/models.md", "docs/reports/gateway.md", "docs/reports/topologies.md")
"""Pages whose lines are as long as what they were made of."""
DTYPES = frozenset("F16 F32 F64 I8 U8 I16 U16 I32 U32 I64 U64".split())
"""Names that look like requirement ids."""
DEAD = re.compile(r"\b(DESIG" r"N|FACT" r"S|REQUIREMENT" r"S)\b|\bfield " r"report|\bissue " r"\d")
"""Words by which code once cited papers that are not in the repository."""
DEAD_IN = (
    "src/",
    "docs/",
    "tests/",
    "benchmarks/",
    "native/",
    "examples/",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)

LONGEST_LINE = 120
LONGEST_ARCHITECTURE = 130
LOG_WORDS = 8000
STEPS = 8  # in the life of a request


# The repository --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    """A text file. `path` is relative to the repository, with slashes."""

    path: str
    text: str

    def is_in(self, places: tuple[str, ...]) -> bool:
        return any(self.path == place or (place.endswith("/") and self.path.startswith(place)) for place in places)


@dataclass(frozen=True)
class Repository:
    """All files, path -> text; "" where a file is not text."""

    files: Mapping[str, str]

    def has(self, path: str) -> bool:
        """Whether there is such a file or directory."""
        path = path.rstrip("/")
        return path in self.files or any(file.startswith(f"{path}/") for file in self.files)

    def headings(self, path: str) -> list[str]:
        """The headings of a page, without their signs."""
        return [match[1].strip() for match in re.finditer(r"^#+ (.*)$", unfenced(self.files.get(path, "")), re.M)]

    def anchors(self, path: str) -> set[str]:
        """What links to a page may have behind `#`, as GitHub makes it of headings."""
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in self.headings(path)}

    def requirements(self) -> list[str]:
        """The ids that are defined, in their order."""
        return re.findall(r"^- \*\*([A-Z]\d{1,2})\*\* \*(?:built|to come)", self.files.get(IDS_PAGE, ""), re.M)


@cache
def repository() -> Repository:
    files: dict[str, str] = {}
    found = [file for file in ROOT.iterdir() if file.is_file() and file.name != ".git"]
    for tree in TREES:
        found += [file for file in (ROOT / tree).rglob("*") if file.is_file()]
    for file in found:
        path = file.relative_to(ROOT).as_posix()
        if not NOT_OURS.search(path):
            try:
                files[path] = file.read_text()
            except UnicodeDecodeError:
                files[path] = ""
    return Repository(files)


def unfenced(text: str) -> str:
    """Markdown without its blocks of code; line numbers stay."""
    return re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)


def prose(page: Page) -> Iterator[str]:
    """The pieces of a file that are written for people, on one line each: paragraphs, comments, strings."""
    suffix = PurePosixPath(page.path).suffix
    if suffix == ".md":
        pieces = re.split(r"\n\s*\n", unfenced(page.text))
    elif suffix == ".py":
        pieces = list(_python_prose(page.text))
    elif suffix in (".h", ".cpp"):
        pieces = re.findall(r"(?:^[^\n]*?//[^\n]*\n)+", page.text, re.M)
    else:
        pieces = [page.text]
    for piece in pieces:
        yield " ".join(re.sub(r"^\s*(#|//)+ ?", "", line) for line in piece.splitlines())


def _python_prose(text: str) -> Iterator[str]:
    """Strings, and comments with those on the lines below."""
    comments: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.append(token.string)
        elif token.type not in (tokenize.NL, tokenize.INDENT):
            yield "\n".join(comments)
            comments = []
        if "STRING" in tokenize.tok_name[token.type]:  # FSTRING_MIDDLE as well
            yield token.string
    yield "\n".join(comments)


def squeezed(text: str) -> str:
    return " ".join(text.split())


# Checkers --------------------------------------------------------------------------------------------------------

ID = r"[A-Z]\d{1,2}"


def citations(text: str) -> Iterator[str]:
    """What brackets cite: ids, one by one, and sections as "design: X". `(A2, F5-F7; design: Lock step)` has five."""
    for group in re.findall(r"\(([^()]*)\)", text):
        for part in squeezed(group).split("; "):
            if part.startswith("design: "):
                yield part
            elif re.match(rf"{ID}(-{ID})?(, |: |$)", part):
                for item in re.split(r", |: ", part):
                    if span := re.fullmatch(r"([A-Z])(\d{1,2})-\1(\d{1,2})", item):
                        yield from (f"{span[1]}{n}" for n in range(int(span[2]), int(span[3]) + 1))
                    elif re.fullmatch(ID, item) and item not in DTYPES:
                        yield item


def dead_citations(page: Page, repository: Repository) -> Iterator[str]:
    """Requirement ids and sections of the design that are cited and not there."""
    known = {*repository.requirements(), *(f"design: {heading}" for heading in repository.headings(IDEAS_PAGE))}
    for piece in prose(page):
        yield from (f"cites ({cited})" for cited in citations(piece) if cited not in known)


def dead_documents(page: Page, repository: Repository) -> Iterator[str]:
    """`docs/x.md` that is not there, and `docs/x.md, "Heading"` without that heading."""
    for piece in prose(page):
        for path, heading in re.findall(r'(?<![\w/])(docs/[\w./-]+\.md)(?:`?, "([^"]+)")?', piece):
            if not repository.has(path):
                yield f"cites {path}"
            elif heading and squeezed(heading) not in map(squeezed, repository.headings(path)):
                yield f'cites {path}, "{heading}"'


def dead_links(page: Page, repository: Repository) -> Iterator[str]:
    """Links of a page to files and headings that are not there."""
    if not page.path.endswith(".md"):
        return
    text = re.sub(r"`[^`\n]*`", "", unfenced(page.text))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue  # another site
        file, _, anchor = target.partition("#")
        path = normpath(f"{PurePosixPath(page.path).parent}/{file}") if file else page.path
        if not repository.has(path):
            yield f"links to {target}"
        elif anchor and anchor not in repository.anchors(path):
            yield f"links to {target}, which has no such heading"


def places(text: str) -> Iterator[tuple[str, str]]:
    """Files that a page names in backticks, each with the function or class behind a colon, or ""."""
    for span in re.findall(r"`([^`]+)`", unfenced(text)):
        named = re.fullmatch(r"((?:[\w.-]+/)*[\w.-]+\.(?:py|h|cpp|md|sh))(?::\s*([\w.]+))?", squeezed(span))
        if named:
            yield named[1], named[2] or ""
        elif re.fullmatch(r"(?:[\w.-]+/)+", span) and span.split("/")[0] in TREES:
            yield span, ""


def dead_places(page: Page, repository: Repository) -> Iterator[str]:
    """Files and functions that a page names in backticks and that are not there."""
    if not page.path.endswith(".md") or page.is_in(HISTORY):
        return
    bases = (".", "src/phalanx", "tests", PurePosixPath(page.path).parent)
    for name, symbol in places(page.text):
        paths = [path for base in bases if repository.has(path := normpath(f"{base}/{name}"))]
        if not paths:
            yield f"names {name}"
        elif symbol and symbol not in symbols(repository.files[paths[0]]):
            yield f"names {symbol} in {name}"


def symbols(source: str) -> set[str]:
    """Functions, classes, methods and variables of a Python file: "f", "C", "C.f", "X"."""
    return set(_names(ast.parse(source).body))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in _names(node.body))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def dead_words(page: Page, repository: Repository) -> Iterator[str]:
    """Papers and numbers that mean nothing to a reader of the repository."""
    if page.is_in(DEAD_IN):
        yield from (f"says {match[0]!r}" for match in DEAD.finditer(page.text))


def long_lines(page: Page, repository: Repository) -> Iterator[str]:
    """Lines of pages that do not fit on a screen; tables and code may be longer."""
    if re.fullmatch(r"(docs/.*|[^/]*)\.md", page.path) and not page.is_in(GENERATED):
        for number, line in enumerate(unfenced(page.text).splitlines(), 1):
            if len(line) > LONGEST_LINE and not line.startswith(("|", "    ")):
                yield f"line {number} has {len(line)} characters"


Checker = Callable[[Page, Repository], Iterator[str]]
CHECKERS: tuple[Checker, ...] = (
    dead_citations,
    dead_documents,
    dead_links,
    dead_places,
    dead_words,
    long_lines,
)


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_nothing_is_wrong(checker: Checker) -> None:
    pages = [Page(path, text) for path, text in repository().files.items() if text]
    problems = {
        f"{page.path}: {problem}": None
        for page in pages
        if not page.is_in(PLANTED)
        for problem in checker(page, repository())
    }
    assert list(problems) == []


# Pages of a certain form -----------------------------------------------------------------------------------------


def section(text: str, heading: str) -> str:
    """What stands below a heading of the second level."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def table_of_layers(text: str) -> dict[str, int]:
    """Package -> number, from the table of the page."""
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", section(text, "Layers"), re.M)
    return {package: int(number) for number, packages in rows for package in re.findall(r"`(\w+)`", packages)}


def steps(text: str) -> list[str]:
    """The numbered steps in the life of a request."""
    return re.split(r"^\d+\. ", section(text, "Life of a request"), flags=re.M)[1:]


def test_the_architecture_is_one_page() -> None:
    assert len(repository().files[ARCHITECTURE].splitlines()) <= LONGEST_ARCHITECTURE


def test_the_log_explains_the_code_of_today_only() -> None:
    """What it has beyond that must go before something new comes."""
    assert (
        sum(len(text.split()) for path, text in repository().files.items() if path.startswith("docs/log/")) <= LOG_WORDS
    )


def test_the_table_of_layers_is_the_rule() -> None:
    layers = {package: number for package, number in LAYERS.items() if package}  # "" is the package itself
    assert table_of_layers(repository().files[ARCHITECTURE]) == layers


def test_the_lists_of_rooms_are_the_rule() -> None:
    listed = re.findall(
        r"^- `(\w+)/`: (.*?) *$", re.sub(r",\n +", ", ", section(repository().files[ARCHITECTURE], "Layers")), re.M
    )
    assert {package: tuple(re.sub("`|root", "", rooms).split(", ")) for package, rooms in listed} == ROOMS


def test_each_step_of_a_request_names_a_function() -> None:
    """That these functions exist is `dead_places`' matter."""
    found = steps(repository().files[ARCHITECTURE])
    assert len(found) == STEPS
    assert [step for step in found if not any(symbol for _, symbol in places(step))] == []


def test_requirements_are_defined_once_and_have_a_status() -> None:
    ids = repository().requirements()
    assert len(set(ids)) == len(ids) > 0
    assert ids == re.findall(rf"\*\*({ID})\*\*", repository().files[IDS_PAGE])


# The checkers can fail -------------------------------------------------------------------------------------------

LIBRARY = Repository(
    {
        IDEAS_PAGE: "# Design\n\n## Lock step\n\n## Fail-stop, then resume\n",
        IDS_PAGE: "- **A1** *built.* One.\n- **A2** *to come.* Two.\n- **A3** *built.* Three.\n",
        "docs/page.md": "# Page\n\n## A heading\n\n```\n## no heading\n```\n",
        "src/phalanx/engine/leader.py": "LIMIT = 1\n\nclass Leader:\n    def run(self): ...\n\ndef serve(): ...\n",
        "native/src/simd.h": "",
    }
)

BAD = [
    (dead_citations, "src/x.py", "'''A docstring (A9).'''"),
    (dead_citations, "src/x.py", "# A comment (A1,\n# A9).\n"),
    (dead_citations, "src/x.py", "x = f'{1} (A9)'"),
    (dead_citations, "src/x.py", "'''A docstring (A1; design: Lock\nsteps).'''"),
    (dead_citations, "src/x.py", "'''A docstring (A9: with its reason).'''"),
    (dead_citations, "native/x.h", "// A comment (A1-A4).\n"),
    (dead_citations, "docs/x.md", "As above (design: No such section)."),
    (dead_documents, "src/x.py", "# see docs/none.md\n"),
    (dead_documents, "Makefile", "# see docs/none.md\n"),
    (dead_documents, "src/x.py", "'''See docs/page.md, \"No\nheading\".'''"),
    (dead_documents, "src/x.py", "'''See docs/page.md, \"no heading\".'''"),
    (dead_links, "docs/x.md", "[x](none.md)"),
    (dead_links, "docs/x.md", "[x](../docs/none.md)"),
    (dead_links, "docs/x.md", "[x](page.md#none)"),
    (dead_links, "README.md", "[x](page.md)"),
    (dead_links, "docs/page.md", "[x](#none)"),
    (dead_places, "docs/x.md", "In `engine/none.py`."),
    (dead_places, "docs/x.md", "In `native/src/none.h`."),
    (dead_places, "docs/x.md", "In `src/none/`."),
    (dead_places, "docs/x.md", "In `engine/leader.py: Leader.walk`."),
    (dead_places, "docs/x.md", "In `engine/leader.py:\n  run`."),
    (dead_words, "src/x.py", f"# as {'design'.upper()} says\n"),
    (dead_words, "README.md", "Written after field" + " reports."),
    (dead_words, "docs/x.md", "As of iss" + "ue 7."),
    (long_lines, "docs/x.md", "word " * 30),
]


@pytest.mark.parametrize(("checker", "path", "text"), BAD, ids=[f"{check.__name__}-{path}" for check, path, _ in BAD])
def test_checker_fails_on(checker: Checker, path: str, text: str) -> None:
    assert list(checker(Page(path, text), LIBRARY))


GOOD = {
    "src/x.py": (
        "'''As said (A1, A2: with a reason; design: Fail-stop,\nthen resume), in docs/page.md, \"A heading\".'''\n"
        "f(F32, F16)  # of arrays (F32, BF16), of ranks (A1-A3), not of (A100) or f(x)\n"
    ),
    "docs/x.md": (
        "See [x](page.md#a-heading), [y](#x), `[z](none.md)`, [w](https://example.org/none.md), `engine/leader.py`,\n"
        "`engine/leader.py: Leader.run`, `engine/leader.py: LIMIT`, `native/src/simd.h`, `page.md`, `hosts.json`.\n\n"
        "# x\n\n```\n[x](none.md) `engine/none.py` (A9)\n```\n| a table may be as long as it likes |" + " " * 200
    ),
}


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
@pytest.mark.parametrize("path", GOOD)
def test_checker_accepts(checker: Checker, path: str) -> None:
    known = Repository({**LIBRARY.files, path: GOOD[path]})
    assert list(checker(Page(path, GOOD[path]), known)) == []


def test_every_checker_is_tested_on_something_bad() -> None:
    assert {checker for checker, _, _ in BAD} == set(CHECKERS)


def test_a_wrong_table_of_layers_is_noticed() -> None:
    text = "# Page\n\n## Layers\n\n| layer | package |\n|---|---|\n| 0 | `errors` `types` | x |\n"
    text += "\n## Next\n\n| 1 | `no` |\n"
    assert table_of_layers(text) == {"errors": 0, "types": 0}


def test_steps_are_counted_and_their_functions_found() -> None:
    text = "# Page\n\n## Life of a request\n\n1. **A.** `a.py: f` does it.\n2. **B.** Nobody does it.\n\n## Next\n"
    first, second = steps(text)
    assert list(places(first)) == [("a.py", "f")] and list(places(second)) == []
