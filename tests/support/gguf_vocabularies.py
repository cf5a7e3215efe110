"""Vocabularies of GGUF files, and how llama.cpp cuts five hundred texts with them.

As a script: `cd tests && python -m support.gguf_vocabularies [SMOLLM2.gguf]` asks llama.cpp anew (llama-cpp-python, of
`make bench-cpu`) and writes `llama_cpp_tokens.json`; the vocabularies there stay. The file has a byte of a checksum of
each text's ids: of 500 texts, a wrong rule changes many.
"""

from __future__ import annotations

import array
import base64
import importlib.metadata
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.gguf_files import CONTROLS, byte_letters, gguf, tiny_metadata
from support.gguf_texts import five_hundred
from tokenizers import Tokenizer

from phalanx.model.gguf.gguf_metadata import Metadata
from phalanx.model.gguf.gguf_pretokenizers import PRE_TOKENIZERS
from phalanx.model.gguf.gguf_tokenizer import write_tokenizer

GOLDEN = Path(__file__).with_name("llama_cpp_tokens.json")
RECORDED: Mapping[str, Any] = json.loads(GOLDEN.read_text())
"""`merges` of bytes and `pieces` of text, each two parts, best first; cases by their `marks`; `version`."""
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
DEFINED = ["  ", "   ", "café", "<s", "<|im_end|>\n", "</s>"]  # tokens that a text is searched for first
UNMERGED = ["null", "Ġreturn", "SELECT"]  # tokens that no merges make
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PHI3 = ["<|endoftext|>", "<|user|>", "<|end|>"]


def byte_level(pre: str, **own: Any) -> dict[str, Any]:
    """Metadata of byte-level BPE."""
    merges = RECORDED["merges"]
    merged = (merge.replace(" ", "") for merge in merges)
    tokens = list(dict.fromkeys([*CONTROLS, *byte_letters(), *merged, *UNMERGED]))
    kinds = [CONTROL] * len(CONTROLS) + [1] * (len(tokens) - len(CONTROLS))
    found = {"tokens": tokens, "token_type": array.array("i", kinds), "merges": merges, "pre": pre, **own}
    return tiny_metadata("llama", **{f"tokenizer__ggml__{key}": value for key, value in found.items()})


def sentencepiece(added: Iterable[str] = (), kind: int = CONTROL, **own: Any) -> dict[str, Any]:
    """Metadata of SentencePiece; `added` are tokens of a kind behind the others."""
    pairs = RECORDED["pieces"]
    letters = sorted({letter for pair in pairs for letter in pair if letter != " "})
    names = dict.fromkeys([*(pair.replace(" ", "") for pair in pairs), *letters])
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *names, *added]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[1] * len(names), *[kind for _ in added]]
    scores = [*[0.0] * 259, *(-float(i) for i in range(len(tokens) - 259))]
    found = {
        "model": "llama", "pre": "default", "tokens": tokens, "token_type": array.array("i", kinds), "merges": None,
        "scores": array.array("f", scores), **own,
    }  # fmt: skip
    return tiny_metadata("llama", **{f"tokenizer__ggml__{key}": value for key, value in found.items()})


def _defined_bytes() -> dict[str, Any]:
    made = byte_level("gpt-2")
    tokens = [*made["tokenizer.ggml.tokens"], *DEFINED]
    kinds = [*made["tokenizer.ggml.token_type"], *[USER_DEFINED] * len(DEFINED)]
    return byte_level("gpt-2", tokens=tokens, token_type=array.array("i", kinds))


def _merged_text(**own: Any) -> dict[str, Any]:
    merges = [pair for pair in RECORDED["pieces"] if "\n" not in pair or set(pair) == {"\n", " "}]
    return sentencepiece(merges=merges, scores=None, **own)


CASES: Mapping[str, Callable[[], dict[str, Any]]] = {
    **{pre: lambda pre=pre: byte_level(pre) for pre in PRE_TOKENIZERS},  # type: ignore[misc]
    "defined tokens": _defined_bytes,
    "no bos": lambda: byte_level("tekken", add_bos_token=False),
    "bos and eos": lambda: byte_level("qwen2", add_bos_token=True, add_eos_token=True),
    "llama": sentencepiece,
    "llama, no prefix": lambda: sentencepiece(add_space_prefix=False, add_bos_token=False, add_eos_token=True),
    "llama, defined tokens": lambda: sentencepiece(DEFINED[:-1], USER_DEFINED),
    "llama, unused tokens": lambda: sentencepiece(["▁Hello▁world"], UNUSED),
    "phi-3": lambda: {**sentencepiece(PHI3), "general.name": "Phi-3 tiny"},
    "gemma4": lambda: _merged_text(model="gemma4", add_bos_token=False),
    "sarvam-moe": lambda: _merged_text(model="gpt2", pre="sarvam-moe"),
}


def texts(case: str) -> list[str]:
    """The five hundred; Phi-3's have its own tokens with blanks behind them."""
    found = five_hundred()
    return [f"<|user|>{text}<|end|> \n{text}<|endoftext|>  x" for text in found] if case == "phi-3" else found


def our_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """What is written for these metadata."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Metadata("x.gguf", metadata), Path(folder))
        return Tokenizer.from_file(f"{folder}/tokenizer.json")


def our_ids(case: str) -> list[list[int]]:
    tokenizer = our_tokenizer(CASES[case]())
    return [encoded.ids for encoded in tokenizer.encode_batch(texts(case))]


def marks(ids: Iterable[list[int]]) -> bytes:
    """A byte for each text."""
    return bytes(zlib.crc32(array.array("i", one).tobytes()) & 255 for one in ids)


def recorded(case: str) -> bytes:
    """Those of llama.cpp's ids."""
    return next(base64.b64decode(found) for found, cases in RECORDED["marks"].items() if case in cases)


def their_ids(file: Path, found: Iterable[str]) -> list[list[int]]:
    """llama.cpp's, of a file."""
    llama_cpp = pytest.importorskip("llama_cpp")
    llama = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    return [llama.tokenize(text.encode(), add_bos=True, special=True) for text in found]


def their_ids_of(case: str) -> list[list[int]]:
    metadata = CASES[case]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.gguf"
        file.write_bytes(gguf({**metadata, "llama.vocab_size": len(metadata["tokenizer.ggml.tokens"])}, {}))
        return their_ids(file, texts(case))


def record(smollm2: Path | None) -> None:
    """Ask llama.cpp."""
    found: dict[str, list[str]] = {}
    for case in CASES:
        found.setdefault(base64.b64encode(marks(their_ids_of(case))).decode(), []).append(case)
    smollm2_marks = marks(their_ids(smollm2, five_hundred())) if smollm2 is not None else recorded("smollm2")
    found.setdefault(base64.b64encode(smollm2_marks).decode(), []).append("smollm2")
    version = f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"
    kept = {**RECORDED, "version": version, "marks": found}
    GOLDEN.write_text(json.dumps(kept, ensure_ascii=False, indent=0) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
