"""What is architecture and not style, kept by plain `ast`: layers, homes of decisions, purity (design: Layers).

Each rule takes one source file and yields what is wrong with it. Rules are tested on bad sources below, so that none of
them can rot into one that never fails. Exceptions are data at the top of this file, each with its reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = {
    **dict.fromkeys(("", "errors", "faults", "types", "log_limits", "environment", "private_files", "demo"), 0),
    **dict.fromkeys(("open_files", "speculation_config", "mlx_lm_adapter", "http"), 0),
    **dict.fromkeys(("config", "memory", "rank_variables", "tls", "sched", "text"), 1),
    **dict.fromkeys(("dist", "kernels", "bench", "catalog", "prefix_store"), 2),
    **dict.fromkeys(("planning", "supervision"), 3),
    **dict.fromkeys(("cluster", "model", "server", "gateway"), 4),
    "spec": 5,
    "engine": 6,
    "offline": 7,
    "cli": 8,
    "__main__": 9,
}
"""A file imports its own package or a lower layer; the name is the first part below `phalanx` ("" is the package)."""

ROOMS = {
    "server": (
        *"settings fields outputs requests sequences answers prompts".split(),
        *(f"dialects/{name}" for name in "common openai messages responses ollama".split()),
        "endpoints",
        "",
    ),
    "gateway": ("settings", "dispatch", "relay", ""),
    "model": ("cache", "sampling", "", "cpu", "gguf", "loading"),
}
"""Folders of a package, ground first: a file imports its own room or one before it ("" is the package's own files)."""

VOCABULARY = (
    "phalanx.errors",
    "phalanx.faults",
    "phalanx.log_limits",
    "phalanx.config",
    "phalanx.environment",
    "phalanx.open_files",
    "phalanx.private_files",
    "phalanx.speculation_config",
    "phalanx.types",
    "phalanx.memory",
)
NARROW = {
    "server": ("phalanx.catalog", "phalanx.http", "phalanx.supervision", "phalanx.text"),
    "gateway": ("phalanx.http",),
    "http": (),
    # bench: a small model's server is timed; catalog: where models lie;
    # dist.gpus: how many MLX can use; dist.topology: which host has which layers;
    # planning: plans and their speed; text: which files are a model's
    "cluster": (
        "phalanx.bench",
        "phalanx.catalog",
        "phalanx.dist.gpus",
        "phalanx.dist.topology",
        "phalanx.planning",
        "phalanx.rank_variables",
        "phalanx.text",
        "phalanx.tls",
    ),
    "bench": ("phalanx.http", "phalanx.tls"),
    "planning": ("phalanx.dist.topology", "phalanx.sched.prefill_budget"),
}
"""Packages that may import the vocabulary, themselves, and only this besides."""

PURE = (
    "http/", "gateway/", "sched/", "spec/",
    *(f"server/{name}/" for name in "settings fields requests sequences answers dialects outputs".split()),
    *(f"catalog/{name}.py" for name in "gguf_names pull_progress short_names".split()),
    "errors.py", "rank_variables.py", "types.py", "cli/launchers.py", "engine/mirror.py", "engine/step_deadline.py",
    *(
        f"cluster/{name}.py"
        for name in "discovery argument_flags host_platform hostfile_parser replica_layout network shape".split()
    ),
    *(f"dist/{name}.py" for name in "stage_frames stall topology".split()),
    *(f"server/endpoints/{name}.py" for name in "migration determinism_key".split()),
    "model/gguf/gguf_header.py", "model/gguf/gguf_pretokenizers.py", "model/model_limits.py",
    "prefix_store/index_log.py",
    *(
        f"planning/{name}.py"
        for name in "candidates fit group_overhead model_shape nearest predictor recommendation timings".split()
    ),
    *(f"supervision/{name}.py" for name in "fast_synch rank_log restarts".split()),
    "text/schema_places.py", "text/stop_strings.py",
)  # fmt: skip
IMPURE = (
    *(f"http/{name}.py" for name in "acceptor allowed_hosts application connection lingering listening".split()),
    *(f"http/{name}.py" for name in "content_encoding model_lists overview_stream refused_keys".split()),
    *(f"http/{name}.py" for name in "service web_page".split()),
    *(f"gateway/{name}.py" for name in "gateway_app gateway_overview gateway_process settings/watched_file".split()),
    *(f"gateway/dispatch/{name}.py" for name in "async_dispatcher fleet".split()),
    *(f"gateway/relay/{name}.py" for name in "attempt proxy relay replica_sessions".split()),
    *(f"server/fields/{name}.py" for name in "call_arguments timestamps".split()),
    *(f"server/requests/{name}.py" for name in "generation_defaults intake parsed".split()),
    *(f"server/sequences/{name}.py" for name in "journal output_queue".split()),
    *(f"server/answers/{name}.py" for name in "call_memory generation".split()),
    *(f"spec/{name}.py" for name in "draft_model running_grammars speculator verify".split()),
)
"""Files of those folders that act."""
IMPURE_MODULES = frozenset(
    "asyncio concurrent datetime io logging mlx mlx_lm multiprocessing numpy os pathlib psutil random secrets select "
    "signal socket subprocess sys tempfile threading time".split()
)
"""Pure files decide; they do not look at clocks, files, arrays or chance."""

NO_MLX = ("catalog/", "http/", "server/", "gateway/", "cluster/", "planning/", "bench/", "supervision/", "text/")
"""What the server process and machines without MLX run: not even indirectly do these import MLX."""

PROCESS_MODULES = frozenset({"subprocess", "multiprocessing", "pty"})
PROCESS_HOMES = (
    "supervision/",
    "cluster/",
    "dist/",
    "cli/demo.py",
    "cli/launch.py",
    "cli/private.py",
    "text/limited_process.py",
    "catalog/package_index.py",
)
PROCESS_CALLS = re.compile(
    r"^(os\.(fork|exec\w+|spawn\w+|posix_spawn\w*|system|popen)|asyncio\.(create_)?subprocess.*)$"
)

PICKLES = frozenset({"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"})

DYNAMIC_IMPORTS = {
    "cli/typer_app.py": "a command's module is imported when the command runs, so that --help is fast",
    "cli/main.py": "the same, and typer, which imports pydantic, is for people's commands only",
    "cli/terminal.py": "most starts draw no bar, for which rich is imported",
    "__init__.py": "phalanx.LLM is imported when it is used, so that `import phalanx` loads nothing",
    "dist/group.py": "certificates are made, by a library that takes long to load, under other launchers only",
    "mlx_lm_adapter.py": "a module of mlx-lm is imported while stand-ins keep it from importing transformers",
    "model/loading/resolve.py": "the hub's client is imported for a hub id only, the importer for a GGUF file only",
    "server/start.py": "the HTTP framework is imported while the ranks load",
    "text/tokenizer_files.py": "a rank loads no tokenizer, and most models need no transformers",
}
"""file -> why it imports modules while it runs."""

BROAD_EXCEPTS: dict[str, str] = {
    "engine/boot.py": "the end of a process: server and other ranks have to know why, whatever it was",
    "http/application.py": "a bug is answered with its id in the log, in the words of the path's dialect",
    "text/library_errors.py": "the library `tokenizers` raises nothing narrower",
}
"""file -> why everything may be caught there."""

SHARED_NAMES = {
    "cli/install.py": "phalanx install",
    "cli/plan.py": "phalanx plan",
    "cli/stop.py": "phalanx stop",
}
"""File -> what it stands for, where a command, whose file has its name, and another file have to share one."""

FOREIGN_WORDS = ("/wo" + "rk/", "/ro" + "ot/", "index-" + "url", "/ho" + "me/")
"""Paths and hosts of the machine somebody built on."""

TREES = ("src", "tests", "tools", "benchmarks", "docs", "deploy", ".ci")


# Sources ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A parsed file of the package. `path` is relative to `src/phalanx`, e.g. "sched/plan.py"."""

    path: str
    tree: ast.Module

    @property
    def module(self) -> str:
        parts = ["phalanx", *self.path.removesuffix(".py").split("/")]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The part that has a layer: "sched" for sched/plan.py, "errors" for errors.py, "" for __init__.py."""
        return (self.module.split(".") + [""])[1]

    def at(self, node: ast.AST, problem: str) -> str:
        return f"src/phalanx/{self.path}:{getattr(node, 'lineno', 1)}: {problem}"

    def is_in(self, homes: tuple[str, ...] | dict[str, str]) -> bool:
        return any(self.path == home or (home.endswith("/") and self.path.startswith(home)) for home in homes)

    def imports(self) -> Iterator[tuple[ast.stmt, str]]:
        """Every imported module, as a dotted name; `from a import b` gives `a` and `a.b`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                yield node, base
                yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def parse(path: str, text: str) -> Source:
    return Source(path, ast.parse(text))


@cache
def package_sources() -> tuple[Source, ...]:
    base = ROOT / "src" / "phalanx"
    return tuple(parse(file.relative_to(base).as_posix(), file.read_text()) for file in sorted(base.rglob("*.py")))


def tracked_files() -> Iterator[Path]:
    """Text files of the repository, without asking git (a source archive has none)."""
    yield from (file for file in ROOT.iterdir() if file.is_file() and file.suffix not in (".log",))
    for tree in TREES:
        for file in (ROOT / tree).rglob("*"):
            inside = file.relative_to(ROOT).parts
            if file.is_file() and not any(part == "__pycache__" or part.endswith(".egg-info") for part in inside):
                yield file


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def top(module: str) -> str:
    return module.partition(".")[0]


# Rules -----------------------------------------------------------------------------------------------------------


def layers(source: Source) -> Iterator[str]:
    """Imports go down, or stay in the package."""
    if source.package not in LAYERS:
        yield source.at(source.tree, f"{source.package} has no layer; give it one in LAYERS")
        return
    mine = LAYERS[source.package]
    for node, name in source.imports():
        if top(name) != "phalanx":
            continue
        other = (name.split(".") + [""])[1]
        if other == source.package or other not in LAYERS:  # not in LAYERS: a name such as phalanx.__version__
            continue
        theirs = LAYERS[other]
        if theirs > mine or (theirs == mine and mine > 0):
            yield source.at(node, f"layer {mine} ({source.package}) imports {name} of layer {theirs}")


def room(module: str, package: str) -> str:
    """The folder of a package's module: "dialects/openai" for phalanx.server.dialects.openai.completions."""
    inside = module.removeprefix(f"phalanx.{package}").strip(".").replace(".", "/")
    return max((name for name in ROOMS[package] if f"{inside}/".startswith(f"{name}/")), key=len, default="")


def rooms(source: Source) -> Iterator[str]:
    """Inside a package, imports go to rooms before."""
    if source.package not in ROOMS:
        return
    order = ROOMS[source.package]
    mine = room(source.module, source.package)
    if mine == "" and source.path.count("/") > 1 and not source.path.endswith("__init__.py"):
        yield source.at(source.tree, "is in a folder without a place in ROOMS")
    for node, name in source.imports():
        if name.startswith(f"phalanx.{source.package}."):
            theirs = room(name, source.package)
            if order.index(theirs) > order.index(mine):
                yield source.at(
                    node, f"room {mine or source.package} imports {name} of room {theirs or source.package}"
                )


def narrow_imports(source: Source) -> Iterator[str]:
    """Server, gateway, cluster and bench know little besides the vocabulary."""
    if source.package not in NARROW:
        return
    allowed = ("phalanx.__version__", f"phalanx.{source.package}", *VOCABULARY, *NARROW[source.package])
    for node, name in source.imports():
        if top(name) == "phalanx" and name.count(".") >= 1:
            if not any(name == a or name.startswith(a + ".") or a.startswith(name + ".") for a in allowed):
                yield source.at(node, f"{source.package} may not import {name}")


def purity(source: Source) -> Iterator[str]:
    """Files that only decide."""
    if source.is_in(PURE) and not source.is_in(IMPURE):
        yield from impurities(source)


def impurities(source: Source) -> Iterator[str]:
    for node, name in source.imports():
        if top(name) in IMPURE_MODULES:
            yield source.at(node, f"a pure file imports {name}")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("open", "input", "print"):
            yield source.at(node, f"a pure file calls {dotted(node.func)}()")


def commits(source: Source) -> Iterator[str]:
    """`Commit(...)` is built in one place (A2)."""
    if source.path == "sched/commit.py":
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "Commit":
            yield source.at(node, "Commit( belongs in sched/commit.py")


def environment(source: Source) -> Iterator[str]:
    """Environment variables are read in environment.py."""
    if source.path == "environment.py":
        return
    names = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    for node, name in source.imports():
        if name in names:
            yield source.at(node, f"{name} belongs in environment.py")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in names:
            yield source.at(node, f"{dotted(node)} belongs in environment.py")


def collectives(source: Source) -> Iterator[str]:
    """`mx.distributed` is used in dist/ only."""
    if source.is_in(("dist/",)):
        return
    for node, name in source.imports():
        if name.startswith("mlx.core.distributed"):
            yield source.at(node, "mlx.core.distributed belongs in dist/")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in ("mx.distributed", "mlx.core.distributed"):
            yield source.at(node, "mx.distributed belongs in dist/")


def processes(source: Source) -> Iterator[str]:
    """Processes are started in their homes."""
    if source.is_in(PROCESS_HOMES):
        return
    for node, name in source.imports():
        if top(name) in PROCESS_MODULES or PROCESS_CALLS.match(name):
            yield source.at(node, f"{name} belongs in {', '.join(PROCESS_HOMES)}")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and PROCESS_CALLS.match(dotted(node)):
            yield source.at(node, f"{dotted(node)} belongs in {', '.join(PROCESS_HOMES)}")


def pickles(source: Source) -> Iterator[str]:
    """Nothing is pickled."""
    for node, name in source.imports():
        if top(name) in PICKLES:
            yield source.at(node, f"imports {name}")


def dynamic_imports(source: Source) -> Iterator[str]:
    """Modules are imported by statements; ruff's PLC0415 keeps those at the top of a file."""
    for node in ast.walk(source.tree):
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        if name in ("__import__", "importlib.import_module", "import_module") and not source.is_in(DYNAMIC_IMPORTS):
            yield source.at(node, f"{name}()")


def broad_excepts(source: Source) -> Iterator[str]:
    """Only named errors are caught."""
    if source.is_in(BROAD_EXCEPTS):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or dotted(kind) in ("Exception", "BaseException") for kind in kinds):
                yield source.at(node, "catches everything")
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "suppress":
            if any(dotted(argument) in ("Exception", "BaseException") for argument in node.args):
                yield source.at(node, "suppresses everything")


def globals_(source: Source) -> Iterator[str]:
    """State belongs to objects."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield source.at(node, f"global {', '.join(node.names)}")


def documented_settings(source: Source) -> Iterator[str]:
    """Every setting has a docstring under it, which is also its help."""
    homes = (
        "config.py",
        "speculation_config.py",
        "server/settings/server_settings.py",
        "gateway/settings/gateway_settings.py",
    )
    if source.path not in (*homes, "offline/sampling_params.py"):
        return
    for cls in (node for node in source.tree.body if isinstance(node, ast.ClassDef)):
        for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign):
                continue
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not (documented and isinstance(after.value.value, str) and after.value.value.strip()):
                yield source.at(field, f"{cls.name}.{ast.unparse(field.target)} has no docstring")


def binary_units(source: Source) -> Iterator[str]:
    """Amounts are counted in powers of 1024, and said so; speeds (GB/s) and a download that pip counts are decimal."""
    prose = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            if found := re.search(r"(?<!\b93 )\b[GM]B\b(?!/s)", node.value):
                yield source.at(node, f"says {found[0]}, not {found[0][0]}iB")


def names(source: Source) -> Iterator[str]:
    """A file is named after what is in it."""
    if source.path.rpartition("/")[2] in ("utils.py", "util.py", "helpers.py", "misc.py"):
        yield source.at(source.tree, "a name that says nothing")


RULES: tuple[Callable[[Source], Iterator[str]], ...] = (
    layers,
    rooms,
    narrow_imports,
    purity,
    commits,
    environment,
    collectives,
    processes,
    pickles,
    dynamic_imports,
    broad_excepts,
    globals_,
    documented_settings,
    binary_units,
    names,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Callable[[Source], Iterator[str]]) -> None:
    problems = [problem for source in package_sources() for problem in rule(source)]
    assert not problems, "\n" + "\n".join(problems)


# Rules over all files --------------------------------------------------------------------------------------------


def graph(sources: tuple[Source, ...]) -> dict[str, set[str]]:
    """module -> modules of ours it imports; importing a.b also runs a/__init__.py, unless that is our own package."""
    known = {source.module for source in sources}
    edges: dict[str, set[str]] = {}
    for source in sources:
        edges[source.module] = set()
        for _, name in source.imports():
            parts = name.split(".")
            prefixes = {".".join(parts[: i + 1]) for i in range(len(parts))}
            own = {prefix for prefix in prefixes if (source.module + ".").startswith(prefix + ".")}
            edges[source.module] |= (prefixes - own) & known
    return edges


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """One import cycle, or nothing."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(edges[module]):
            if found := visit(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(edges) if (found := visit(module, []))), [])


def mlx_behind(sources: tuple[Source, ...]) -> list[str]:
    """Chains of imports by which a file of NO_MLX reaches mlx."""
    edges = graph(sources)
    direct = {source.module for source in sources if any(top(name) == "mlx" for _, name in source.imports())}
    chains = []
    for source in sources:
        if not source.is_in(NO_MLX):
            continue
        paths = {source.module: [source.module]}
        queue = [source.module]
        for module in queue:
            if module in direct:
                chains.append(" -> ".join([*paths[module], "mlx"]))
            for other in sorted(edges[module] - paths.keys()):
                paths[other] = [*paths[module], other]
                queue.append(other)
    return chains


def meanings(sources: tuple[Source, ...]) -> dict[str, list[str]]:
    """Names of files and of public classes -> the files that have them, where those are several."""
    found: dict[str, list[str]] = {}
    for source in sources:
        file = SHARED_NAMES.get(source.path, source.path.rpartition("/")[2])
        classes = [node.name for node in source.tree.body if isinstance(node, ast.ClassDef)]
        for name in (file, *classes):
            if name != "__init__.py" and not name.startswith("_"):
                found.setdefault(name, []).append(source.path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_no_file_or_class_shares_its_name_with_another() -> None:
    assert meanings(package_sources()) == {}


def test_no_import_cycles() -> None:
    assert cycle(graph(package_sources())) == []


def test_the_server_process_runs_without_mlx() -> None:
    assert mlx_behind(package_sources()) == []


def test_lists_name_files_that_exist() -> None:
    """A file outlives its place in a list silently, and an exception its reason, unless this fails."""
    sources = package_sources()
    listed = (*PURE, *IMPURE, *NO_MLX, *SHARED_NAMES, *PROCESS_HOMES, *DYNAMIC_IMPORTS, *BROAD_EXCEPTS)
    assert [home for home in listed if not any(source.is_in((home,)) for source in sources)] == []
    assert [source.path for source in sources if source.is_in(IMPURE) and not any(impurities(source))] == []


def foreign_words(text: str) -> list[str]:
    return [word for word in FOREIGN_WORDS if word in text]


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    problems = []
    for file in tracked_files():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue  # weights
        problems += [f"{file.relative_to(ROOT)}: {word}" for word in foreign_words(text)]
    assert problems == []


def test_nothing_outside_the_package_is_pickled() -> None:
    for tree in ("tests", "tools", "benchmarks", "examples"):
        for file in sorted((ROOT / tree).rglob("*.py")):
            assert list(pickles(parse(file.name, file.read_text()))) == [], file


# The rules can fail ----------------------------------------------------------------------------------------------

BAD = [
    (layers, "sched/x.py", "import phalanx.engine.boot"),
    (rooms, "server/fields/x.py", "from phalanx.server.requests.parsed import ChatRequest"),
    (rooms, "server/dialects/openai/x.py", "from phalanx.server.dialects import ollama"),
    (rooms, "gateway/settings/x.py", "from phalanx.gateway.gateway_app import App"),
    (rooms, "server/novelty/x.py", ""),
    (layers, "types.py", "from phalanx.sched import plan"),
    (layers, "server/x.py", "from phalanx.gateway import proxy"),
    (layers, "novelty/x.py", ""),
    (narrow_imports, "server/x.py", "from phalanx.engine.leader import Leader"),
    (narrow_imports, "server/x.py", "from phalanx.model import cache"),
    (narrow_imports, "gateway/x.py", "from phalanx.supervision.client import EngineClient"),
    (purity, "sched/x.py", "import time"),
    (purity, "sched/x.py", "from mlx import core"),
    (purity, "sched/x.py", "open('f')"),
    (commits, "engine/x.py", "Commit(1)"),
    (commits, "engine/x.py", "plan.Commit(1)"),
    (environment, "cli/x.py", "import os\nos.environ['A']"),
    (environment, "cli/x.py", "from os import getenv"),
    (collectives, "engine/x.py", "import mlx.core as mx\nmx.distributed.init()"),
    (collectives, "model/x.py", "from mlx.core.distributed import all_sum"),
    (processes, "server/x.py", "import subprocess"),
    (processes, "server/x.py", "import asyncio\nasyncio.create_subprocess_exec('ls')"),
    (processes, "model/x.py", "import os\nos.execvp('ls', [])"),
    (pickles, "engine/x.py", "from pickle import loads"),
    (dynamic_imports, "engine/x.py", "import importlib\nimportlib.import_module('json')"),
    (broad_excepts, "engine/x.py", "try:\n    pass\nexcept Exception:\n    pass"),
    (broad_excepts, "engine/x.py", "try:\n    pass\nexcept:\n    pass"),
    (broad_excepts, "engine/x.py", "try:\n    pass\nexcept (OSError, BaseException):\n    pass"),
    (broad_excepts, "engine/x.py", "import contextlib\nwith contextlib.suppress(Exception):\n    pass"),
    (globals_, "engine/x.py", "def f():\n    global a"),
    (documented_settings, "config.py", "class C:\n    a: int = 1\n    b: int = 2\n    '''documented'''"),
    (binary_units, "cli/x.py", "f'{size / GB:.1f} GB'"),
    (binary_units, "cli/x.py", "log.info('%.2f MB', size)"),
    (names, "engine/utils.py", ""),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD, ids=[f"{rule.__name__}-{path}" for rule, path, _ in BAD])
def test_rule_fails_on(rule: Callable[[Source], Iterator[str]], path: str, text: str) -> None:
    assert list(rule(parse(path, text)))


GOOD = """'''A module.'''
import json

from phalanx.errors import ConfigError
from phalanx.sched.plan import Commit

def f(commit: Commit) -> str:
    try:
        return json.dumps(commit)
    except ValueError as error:
        raise ConfigError("no") from error
"""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_accepts_ordinary_code(rule: Callable[[Source], Iterator[str]]) -> None:
    assert list(rule(parse("engine/x.py", GOOD))) == []


def test_every_rule_is_tested_on_bad_code() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)


def test_shared_names_are_found() -> None:
    sources = (parse("sched/x.py", "class A: ...\nclass B: ..."), parse("spec/x.py", "class A: ...\nclass _B: ..."))
    assert meanings(sources) == {"x.py": ["sched/x.py", "spec/x.py"], "A": ["sched/x.py", "spec/x.py"]}


def test_cycles_are_found() -> None:
    a, b = parse("sched/a.py", "import phalanx.sched.b"), parse("sched/b.py", "from phalanx.sched import a")
    assert cycle(graph((a, b))) == ["phalanx.sched.a", "phalanx.sched.b", "phalanx.sched.a"]


def test_indirect_mlx_is_found() -> None:
    sources = (
        parse("text/__init__.py", "import mlx.core"),
        parse("text/tokenizer.py", ""),
        parse("server/server_app.py", "from phalanx.text.tokenizer import Tokenizer"),
    )
    assert "phalanx.server.server_app -> phalanx.text -> mlx" in mlx_behind(sources)


def test_foreign_words_are_found() -> None:
    assert foreign_words("see " + FOREIGN_WORDS[0]) == [FOREIGN_WORDS[0]]
