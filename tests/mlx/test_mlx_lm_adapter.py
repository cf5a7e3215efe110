"""mlx-lm's models without its `__init__`, and all of it for code that asks for more. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

HEAVY = "{'transformers', 'huggingface_hub', 'httpx', 'jinja2', 'tokenizers', 'pydantic', 'rich'} & set(sys.modules)"


def run(*lines: str) -> str:
    found = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=400)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_a_rank_imports_no_transformers() -> None:
    assert run("import sys, phalanx.cli.main, phalanx.cli.rank", f"print({HEAVY})") == "set()"


def test_a_models_own_code_may_use_all_of_mlx_lm() -> None:
    used = run(
        "import phalanx.model.registry, sys",
        "assert 'transformers' not in sys.modules",
        "from mlx_lm import generate, load, __version__",
        "from mlx_lm.tokenizer_utils import TokenizerWrapper",
        "import mlx_lm, mlx_lm.generate, transformers",
        "print(generate.__module__, load.__module__, mlx_lm.stream_generate.__name__, bool(__version__))",
    )
    assert used == "mlx_lm.generate mlx_lm.utils stream_generate True"


def test_the_loader_finds_the_real_tokenizers_when_it_is_called() -> None:
    kind = run(
        "from phalanx.demo import MODEL_DIR",
        "from phalanx.mlx_lm_adapter import import_utils",
        "print(type(import_utils().load_tokenizer(MODEL_DIR)).__name__)",
    )
    assert kind == "TokenizerWrapper"


def test_an_unknown_name_is_an_import_error() -> None:
    said = run(
        "import phalanx.model.registry, mlx_lm, sys",
        "print(hasattr(mlx_lm, '__wrapped__'), 'transformers' in sys.modules)",
        "print(hasattr(mlx_lm, 'no_such_name'), 'transformers' in sys.modules)",
    )
    assert said == "False False\nFalse True"


def test_the_limit_of_open_files_is_left_alone() -> None:
    """mlx-lm lowers it when it is imported, the hard limit for good."""
    limits = run(
        "import resource; limits = resource.getrlimit(resource.RLIMIT_NOFILE)",
        "from phalanx.mlx_lm_adapter import import_utils",
        "import_utils(); print(resource.getrlimit(resource.RLIMIT_NOFILE) == limits)",
        "import mlx_lm; mlx_lm.generate; print(resource.getrlimit(resource.RLIMIT_NOFILE) == limits)",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))",
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])",
    )
    assert limits == "True\nTrue\n100"


def test_mlx_lm_that_is_imported_already_is_left_alone() -> None:
    same = run(
        "import mlx_lm, sys; before = sys.modules['mlx_lm'], sys.modules['mlx_lm.utils']",
        "from phalanx.mlx_lm_adapter import import_utils, register",
        "register(); print(before == (sys.modules['mlx_lm'], import_utils()))",
    )
    assert same == "True"
