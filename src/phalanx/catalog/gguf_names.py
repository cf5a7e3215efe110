"""Names of GGUF files: of the parts of a model, and of a repository's quantisations as llama.cpp and Ollama write them.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from phalanx.catalog.short_names import HOSTS
from phalanx.errors import ModelNotFound

PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Of `llama-gguf-split`: the model, the number of the part from 1 on, and how many there are."""
MAX_PARTS = 1000
QUANT = re.compile(r"(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|FP?16|FP?32)", re.ASCII | re.IGNORECASE)
DEFAULTS = ("Q4_K_M", "Q4_0")
"""The quantisation of a name without one, if the repository has it; as llama.cpp. Else its first file."""
NO_MODELS = ("mmproj", "imatrix")
"""Words in the names of files that lie beside models: projectors of images, statistics."""


def part_names(name: str) -> list[str]:
    """The names of all files of a model, by that of one of them."""
    found = PART_NAME.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]) <= MAX_PARTS:
        return [name]
    return [f"{found[1]}-{part:05}-of-{found[3]}.gguf" for part in range(1, int(found[3]) + 1)]


def is_gguf_path(name: str) -> bool:
    """Whether a name means a file by its suffix, rather than a repository or a file of one."""
    return name.endswith(".gguf") and ":" not in name and not name.startswith(HOSTS)


def stem_of(name: str) -> str:
    """A file's name without its suffix and without its number among the parts."""
    found = PART_NAME.fullmatch(name)
    return found[1] if found else name.removesuffix(".gguf")


def split_quant(name: str) -> tuple[str, str]:
    """A repository, and the quantisation that is named after a colon; "" without one."""
    repository, _, quant = name.partition(":")
    return repository, quant


def choose_files(repository: str, quant: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """The files of a repository that a name means.

    Args:
        quant: such as Q4_K_M in any case, or a file's name; "" for the default.
        names: of all files.

    Returns:
        The quantisation as the repository writes it, and its files.

    Raises:
        ModelNotFound: there is none such, or several; names those there are.
    """
    models = _models(names)
    if not models:
        raise ModelNotFound(f"{repository} has no GGUF files.", remedy="Choose another repository.")
    quants = {first: _label(first) for first in models}
    labels = {
        first: label if list(quants.values()).count(label) == 1 else stem_of(first.rpartition("/")[2])
        for first, label in quants.items()
    }
    if not quant:
        wanted = (first for default in DEFAULTS for first in models if quants[first].upper() == default)
        first = next(wanted, next(iter(models)))
        return labels[first], models[first]
    found = [first for first in models if quant.lower() in _spellings(first, quants[first])]
    if len(found) == 1:
        return labels[found[0]], models[found[0]]
    if found:
        files = [labels[first] for first in found]
        problem = f"{repository} has several models of {quant}: {', '.join(files)}."
        raise ModelNotFound(problem, remedy=f"Name one as {repository}:{files[0]}.")
    there = ", ".join(dict.fromkeys(labels.values()))
    raise ModelNotFound(f"{repository} has no {quant}; it has {there}.", remedy=f"Name one as {repository}:QUANT.")


def _models(names: Sequence[str]) -> Mapping[str, list[str]]:
    """The first file of each model -> all of its files."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        folder, slash, file = name.rpartition("/")
        if file.endswith(".gguf") and not any(word in file.lower() for word in NO_MODELS):
            parts = [f"{folder}{slash}{part}" for part in part_names(file)]
            models.setdefault(parts[0], parts)
    return models


def _label(first: str) -> str:
    """The quantisation that a file's name has last, else its folder's; else the name itself."""
    folder, _, file = first.rpartition("/")
    stem = stem_of(file)
    for text in (stem, folder.rpartition("/")[2]):
        words = re.split(r"(?<!UD)[-.]", text, flags=re.IGNORECASE)
        if found := [word for word in words if QUANT.fullmatch(word)]:
            return found[-1]
    return stem


def _spellings(first: str, label: str) -> tuple[str, ...]:
    """How a model may be named, in lower case."""
    file = first.rpartition("/")[2]
    return tuple(text.lower() for text in (label, label.removeprefix("UD-"), file, stem_of(file)))
