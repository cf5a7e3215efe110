"""Names of GGUF files: which files of a repository are meant, as llama.cpp and Ollama write it."""

from __future__ import annotations

import pytest

from phalanx.catalog.gguf_names import choose_files, part_names, split_quant, stem_of
from phalanx.catalog.short_names import repository_of
from phalanx.errors import ModelNotFound
from phalanx.server.requests.parsed import shown_name

FLAT = ["README.md", "config.json", "M-F16.gguf", "M-Q4_0.gguf", "M-Q4_K_M.gguf", "M-Q8_0.gguf", "M-IQ4_XS.gguf"]
BESIDE = ["mmproj-M-f16.gguf", "M.imatrix.gguf"]
FOLDERS = [
    "BF16/M-BF16-00001-of-00002.gguf", "BF16/M-BF16-00002-of-00002.gguf", "M-UD-Q4_K_XL.gguf", "Q8_0/M.gguf",
    "m.q5_k_m.gguf", "M-UD-IQ2_XXS.gguf", "m-fp16.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("quant", "names", "label", "files"),
    [
        ("", FLAT + BESIDE, "Q4_K_M", ["M-Q4_K_M.gguf"]),
        ("", [name for name in FLAT if "K_M" not in name], "Q4_0", ["M-Q4_0.gguf"]),
        ("", ["M-Q8_0.gguf", "M-Q6_K.gguf"], "Q6_K", ["M-Q6_K.gguf"]),
        ("", ["ggml-model.gguf"], "ggml-model", ["ggml-model.gguf"]),
        ("", ["b.gguf", "a.gguf"], "a", ["a.gguf"]),
        ("Q8_0", FLAT, "Q8_0", ["M-Q8_0.gguf"]),
        ("q8_0", FLAT, "Q8_0", ["M-Q8_0.gguf"]),
        ("M-Q8_0.gguf", FLAT, "Q8_0", ["M-Q8_0.gguf"]),
        ("M-Q8_0", FLAT, "Q8_0", ["M-Q8_0.gguf"]),
        ("F16", FLAT + BESIDE, "F16", ["M-F16.gguf"]),
        ("iq4_xs", FLAT, "IQ4_XS", ["M-IQ4_XS.gguf"]),
        ("BF16", FOLDERS, "BF16", FOLDERS[:2]),
        ("UD-Q4_K_XL", FOLDERS, "UD-Q4_K_XL", ["M-UD-Q4_K_XL.gguf"]),
        ("Q4_K_XL", FOLDERS, "UD-Q4_K_XL", ["M-UD-Q4_K_XL.gguf"]),
        ("Q8_0", FOLDERS, "Q8_0", ["Q8_0/M.gguf"]),
        ("Q5_K_M", FOLDERS, "q5_k_m", ["m.q5_k_m.gguf"]),
        ("FP16", FOLDERS, "fp16", ["m-fp16.gguf"]),
        ("a-Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "a-Q8_0", ["a-Q8_0.gguf"]),
    ],
)
def test_a_name_means_these_files(quant: str, names: list[str], label: str, files: list[str]) -> None:
    assert choose_files("o/r", quant, names) == (label, files)


@pytest.mark.parametrize(
    ("quant", "names", "said"),
    [
        ("Q9", FLAT + BESIDE, r"o/r has no Q9; it has F16, IQ4_XS, Q4_0, Q4_K_M, Q8_0\. Name one as o/r:QUANT"),
        ("Q4_K_M", ["README.md", "model.safetensors", *BESIDE], "o/r has no GGUF files"),
        ("Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], r"several models of Q8_0: a-Q8_0, b-Q8_0\. Name one as o/r:a-Q8_0"),
        ("", [], "no GGUF files"),
    ],
)
def test_a_name_that_means_none_or_several_is_refused(quant: str, names: list[str], said: str) -> None:
    with pytest.raises(ModelNotFound, match=said):
        choose_files("o/r", quant, names)


def test_names_of_parts() -> None:
    three = [f"a-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert [part_names(name) for name in three] == [three] * 3
    for name in ("a.gguf", "a-00004-of-00003.gguf", "a-00000-of-00003.gguf", "a-00001-of-99999.gguf", "-1-of-3.gguf"):
        assert part_names(name) == [name]
    assert (stem_of(three[1]), stem_of("b.Q4_0.gguf"), stem_of("c")) == ("a", "b.Q4_0", "c")


def test_the_hubs_host_may_stand_before_a_name() -> None:
    for host in ("hf.co/", "huggingface.co/"):
        assert repository_of(f"{host}o/r-GGUF:Q8_0") == shown_name(f"{host}o/r-GGUF:Q8_0") == "o/r-GGUF:Q8_0"
    assert split_quant("o/r-GGUF:Q8_0") == ("o/r-GGUF", "Q8_0") and split_quant("o/r") == ("o/r", "")
