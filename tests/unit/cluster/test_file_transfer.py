"""Model files arriving on a host: whole or not at all, and going on where they were interrupted."""

from __future__ import annotations

import io
import json
import os
import resource
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from phalanx.catalog import local_models
from phalanx.cluster import distribution
from phalanx.cluster.file_transfer import Manifest, directory_of, finish, inventory, manifest, missing_shards, take
from phalanx.cluster.library import NEEDED, find_model, is_needed
from phalanx.errors import ClusterError, ConfigError, ModelError, ModelNotFound
from phalanx.model.loading.weight_files import INDEX, PATTERN

BODY = bytes(range(256)) * 9000  # more than two blocks


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def wanted(tmp_path: Path, home: Path) -> Manifest:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "sub" / "model.safetensors").write_bytes(BODY)
    (source / ".cache").mkdir()
    (source / ".cache" / "junk").write_text("x")
    return manifest(source, "models/m")


def weights(wanted: Manifest):
    return next(entry for entry in wanted.files if entry.path == "sub/model.safetensors")


def test_a_manifest_has_all_files_that_are_not_hidden(wanted):
    assert [entry.path for entry in wanted.files] == ["config.json", "sub/model.safetensors"]
    assert weights(wanted).bytes == len(BODY)


def test_a_file_arrives(wanted, home):
    assert [missing.have for missing in inventory(wanted).missing] == [0, 0]
    assert take(wanted.place, weights(wanted), 0, io.BytesIO(BODY)).bytes == len(BODY)
    assert (home / "models/m/sub/model.safetensors").read_bytes() == BODY
    assert [missing.path for missing in inventory(wanted).missing] == ["config.json"]


def test_an_interrupted_file_goes_on_where_it_ended(wanted, home):
    cut = len(BODY) // 2
    with pytest.raises(ClusterError, match="interrupted after"):
        take(wanted.place, weights(wanted), 0, io.BytesIO(BODY[:cut]))
    assert not (home / "models/m/sub/model.safetensors").exists()
    (missing,) = [one for one in inventory(wanted).missing if one.have]
    assert missing.have == cut
    assert take(wanted.place, weights(wanted), cut, io.BytesIO(BODY[cut:])).bytes == len(BODY) - cut
    assert (home / "models/m/sub/model.safetensors").read_bytes() == BODY


def test_a_file_that_arrives_wrong_is_thrown_away(wanted, home):
    with pytest.raises(ClusterError, match="wrong checksum"):
        take(wanted.place, weights(wanted), 0, io.BytesIO(b"x" * len(BODY)))
    assert list((home / "models/m/sub").iterdir()) == []


def test_a_file_that_was_changed_is_missing(wanted, home):
    take(wanted.place, weights(wanted), 0, io.BytesIO(BODY))
    with (home / "models/m/sub/model.safetensors").open("r+b") as file:
        file.write(b"y")
    assert "sub/model.safetensors" in [missing.path for missing in inventory(wanted).missing]


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../../x", "", "a//b", "./a", ".ssh/authorized_keys", "a\nb", "a\0", "a.part"]
)
def test_no_file_leaves_the_directory(wanted, path):
    with pytest.raises(ConfigError, match="is not a file of a model"):
        take(wanted.place, replace(weights(wanted), path=path), 0, io.BytesIO(b""))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside the model, to which a link leads that is already on the receiving host."""
    file = tmp_path / "victim"
    file.write_text("precious")
    return file


def plant(home: Path) -> Path:
    folder = home / "models/m/sub"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("kind", ["symbolic", "hard", "fifo"])
def test_what_is_planted_where_a_file_is_received_stays_as_it_is(wanted, home, victim, kind):
    part = plant(home) / "model.safetensors.part"
    if kind == "symbolic":
        part.symlink_to(victim)
    elif kind == "hard":
        part.hardlink_to(victim)
    else:
        os.mkfifo(part)
    assert [missing.have for missing in inventory(wanted).missing] == [0, 0]
    take(wanted.place, weights(wanted), 0, io.BytesIO(BODY))
    assert victim.read_text() == "precious"
    assert (home / "models/m/sub/model.safetensors").read_bytes() == BODY


def test_a_link_in_place_of_a_file_is_replaced(wanted, home, victim):
    file = plant(home) / "model.safetensors"
    file.symlink_to(victim)
    take(wanted.place, weights(wanted), 0, io.BytesIO(BODY))
    assert victim.read_text() == "precious" and not file.is_symlink() and file.read_bytes() == BODY


def test_a_link_in_place_of_a_folder_is_not_followed(wanted, home, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = plant(home)
    folder.rmdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(ClusterError, match=r"cannot write .*model\.safetensors: Not a directory .*remove the link"):
        take(wanted.place, weights(wanted), 0, io.BytesIO(BODY))
    assert list(elsewhere.iterdir()) == []


def test_the_current_revision_is_not_written_through_a_link(wanted, home, victim):
    there = replace(wanted, place="hub:owner/name@abc123")
    refs = directory_of(there.place).parent.parent / "refs"
    refs.mkdir(parents=True)
    (refs / "main").symlink_to(victim)
    finish(there)
    assert victim.read_text() == "precious" and (refs / "main").read_text() == "abc123"


@pytest.mark.parametrize("place", ["../x", "models/../../x", "models/m\n", "hub:a/b\0@c"])
def test_no_model_leaves_its_place(wanted, place):
    with pytest.raises(ConfigError, match="is not a name of a file or folder"):
        take(place, weights(wanted), 0, io.BytesIO(BODY))


def test_no_more_is_stored_than_was_announced(wanted, home):
    stream = io.BytesIO(BODY + b"more")
    take(wanted.place, weights(wanted), 0, stream)
    assert stream.read() == b"more"
    for have in (-1, len(BODY) + 1):
        with pytest.raises(ConfigError, match="bytes were received already"):
            take(wanted.place, weights(wanted), have, io.BytesIO(b""))


def test_a_full_disk_is_one_line_and_leaves_nothing(wanted, home):
    folder = plant(home)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(BODY) // 2, limits[1]))
    try:
        with pytest.raises(ClusterError) as full:
            take(wanted.place, weights(wanted), 0, io.BytesIO(BODY))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{socket.gethostname()} cannot store sub/model.safetensors: File too large after" in full.value.message
    assert f"of {len(BODY)} bytes" in full.value.message and "Make room" in full.value.remedy
    assert list(folder.iterdir()) == []


def test_a_link_out_of_the_model_is_not_sent(tmp_path, victim):
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "same.json").symlink_to("config.json")
    assert len(manifest(source, "m").files) == 2
    (source / "vocab.txt").symlink_to(victim)
    with pytest.raises(ClusterError, match=r"vocab\.txt is a link that leads out of the model, to .*victim"):
        manifest(source, "m")


def test_the_hubs_links_to_its_blobs_are_sent(home):
    snapshot = directory_of("hub:owner/name@abc123")
    blobs = snapshot.parent.parent / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "0123").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    assert [entry.bytes for entry in manifest(snapshot, "hub:owner/name@abc123").files] == [2]


def test_a_hub_model_lands_in_the_hub_cache_under_its_name(wanted, home):
    there = replace(wanted, place="hub:owner/name@abc123")
    for entry, body in zip(wanted.files, (b"{}", BODY), strict=True):
        take(there.place, entry, 0, io.BytesIO(body))
    assert finish(there).missing == []
    found = local_models.directory_of("owner/name")
    assert found == directory_of(there.place) and (found.parent.parent / "refs" / "main").read_text() == "abc123"
    assert distribution.place_of(found) == there.place
    with pytest.raises(ConfigError, match="hub:OWNER/NAME@REVISION"):
        directory_of("hub:owner/name@../x")


def test_models_with_the_same_files_are_the_same(home, tmp_path):
    """As far as serving reads them."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(BODY)
    (other / "consolidated.safetensors").write_bytes(BODY)
    (other / "README.md").write_text("x")
    first, second = find_model(str(one)), find_model(str(other))
    assert first is not None and second is not None
    assert first.digest == second.digest and first.bytes == second.bytes == len(BODY)
    (other / "config.json").write_text('{"x": 1}')
    assert find_model(str(other)).digest != first.digest
    assert find_model("owner/nowhere") is None


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors", "model-00001-of-00002.safetensors", INDEX, "config.json", "generation_config.json",
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "qwen.tiktoken", "tiktoken.model", "vocab.json",
        "merges.txt", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "modeling_kimi.py",
        "code/tokenization.py",
    ],
)  # fmt: skip
def test_files_that_serving_reads_are_needed(name):
    assert is_needed(name)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "consolidated.safetensors",
        "consolidated.safetensors.index.json", "consolidated.00.pth", "original/params.json",
        "original/tokenizer.model",
        "onnx/model.onnx", "onnx/config.json", "model-q4_k_m.gguf", "tf_model.h5", "flax_model.msgpack", "README.md",
        "LICENSE", "figures/speed.png", "metal/model.safetensors", "adapter_model.safetensors",
        "model.safetensors.part",
    ],
)  # fmt: skip
def test_other_formats_and_documentation_are_not_needed(name):
    assert not is_needed(name)


def test_the_weights_that_are_loaded_are_needed():
    assert PATTERN in NEEDED and is_needed(INDEX)


def test_needed_sends_only_files_that_serving_reads(tmp_path):
    for name in ("config.json", "model.safetensors", "consolidated.safetensors", "README.md"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "params.json").write_text("{}")
    names = [entry.path for entry in distribution.prepare(str(tmp_path), needed=True).files]
    assert names == ["config.json", "model.safetensors"]
    assert len(distribution.prepare(str(tmp_path)).files) == 5


def test_a_model_that_is_not_whole_is_not_sent(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"x": "one.safetensors", "y": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").write_bytes(b"1")
    assert missing_shards(tmp_path, ["one.safetensors"]) == ["two.safetensors"]
    with pytest.raises(ModelNotFound, match=r"not whole: two\.safetensors is missing"):
        distribution.prepare(str(tmp_path))
    for damaged in ("[" * 100_000, "", "[]", "{}", '{"weight_map": {"x": ["one.safetensors"]}}'):
        (tmp_path / "model.safetensors.index.json").write_text(damaged)
        with pytest.raises(ModelError, match=r"index\.json is"):
            distribution.prepare(str(tmp_path))
