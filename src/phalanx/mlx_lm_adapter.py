"""Imports the parts of mlx-lm that phalanx needs, its models and their loader, without the rest of it.

`mlx_lm/__init__.py` imports a generator and a converter, and through them transformers and the hub's client: more than
half a second in every process, for names that phalanx never uses. `register` puts the package into `sys.modules`
without running that file. `import mlx_lm.models.llama` then costs what that module itself imports. Imports neither MLX
nor mlx-lm itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import resource
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

PACKAGE = "mlx_lm"

UNUSED = {"mlx_lm.tokenizer_utils": ("TokenizerWrapper", "load"), "huggingface_hub": ("snapshot_download",)}
"""Module -> names that `mlx_lm.utils` imports from it, for functions of its own that phalanx does not call."""


def register() -> None:
    """Make submodules of mlx-lm importable without its `__init__`. Does nothing if mlx-lm is imported already.

    `__init__` still runs, once, as soon as code asks the package for a name that only it defines: a model's own code
    (`--trust-remote-code`) may say `from mlx_lm import generate`.
    """
    if PACKAGE in sys.modules:
        return
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.loader is None:
        return  # mlx-lm is not installed: the import that needs it says so
    package = importlib.util.module_from_spec(spec)
    run_init = spec.loader.exec_module

    def define(name: str) -> Any:
        if name.startswith("__") and name not in ("__version__", "__all__"):
            raise AttributeError(name)  # a look by the import system or `inspect`
        del package.__dict__["__getattr__"]
        with _limits_kept():
            run_init(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = define
    sys.modules[PACKAGE] = package


def import_utils() -> Any:
    """The module `mlx_lm.utils`, which has mlx-lm's loader of models.

    It imports transformers and the hub's client at its top, for functions that phalanx does not call. While it is
    imported, these two are replaced by modules of stand-ins; a stand-in imports its real module when it is called.
    Modules that are imported already are left alone.
    """
    register()
    name = f"{PACKAGE}.utils"
    if name in sys.modules:
        return sys.modules[name]
    replaced = [module for module in UNUSED if module not in sys.modules]
    for module in replaced:
        sys.modules[module] = _stand_ins(module, UNUSED[module])
    try:
        with _limits_kept():
            return importlib.import_module(name)
    finally:
        for module in replaced:
            del sys.modules[module]


@contextlib.contextmanager
def _limits_kept() -> Iterator[None]:
    """A context in which modules that are imported cannot change this process's limits.

    `mlx_lm.utils` sets the limit of open files to 2,048, and for good to 4,096, when it is imported. Here
    `open_files.py` decides.
    """
    stand_in = ModuleType("resource")
    stand_in.__dict__.update(vars(resource), setrlimit=lambda *_: None)
    sys.modules["resource"] = stand_in
    try:
        yield
    finally:
        sys.modules["resource"] = resource


def _stand_ins(module: str, names: tuple[str, ...]) -> ModuleType:
    """A module whose functions import the real one when they are called."""

    def stand_in(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(module), name)(*args, **kwargs)

        return call

    found = ModuleType(module)
    found.__dict__.update({name: stand_in(name) for name in names})
    return found
