"""Imports of GGUF files: once by their content, by one process at a time, whole or to be gone on with."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.gguf_files import entries_of, write_tiny

from phalanx.catalog.imports import (
    BEGUN,
    ORIGIN,
    directory_for,
    imported_name,
    imports_folder,
    origin_of,
    recorded_files,
)
from phalanx.catalog.local_models import directory_of, find, local_models, remove
from phalanx.catalog.pull_progress import PullProgress
from phalanx.cli import show
from phalanx.environment import own_cache
from phalanx.errors import ModelError, ModelNotFound, WeightsError
from phalanx.model.gguf import gguf_import, import_journal, import_once
from phalanx.model.gguf.gguf_import import convert
from phalanx.model.gguf.import_once import import_gguf
from phalanx.model.loading.resolve import resolve


def no_reading(*_: object) -> str:
    pytest.fail("read the whole file again")


def test_a_file_is_imported_once_and_found_by_path_and_name(file: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[PullProgress] = []
    made = resolve(str(file), report=said.append)
    assert made.parent == imports_folder() and made.name.startswith("Tiny_one-")
    for status in ("reading Tiny one.gguf", "importing Tiny one.gguf"):
        lines = [line for line in said if line.status == status]
        assert lines[-1].completed == lines[-1].total > 0
    monkeypatch.setattr(import_once, "_sha256", no_reading)
    for name in (str(file), file.name, made.name):
        assert resolve(name) == directory_of(name) == made
        found = find(name)
        assert (found.name, found.family, found.bits, found.lacks) == (made.name, "llama", "8", "")
        assert found.bytes == (made / "model.safetensors").stat().st_size and found.context == 512
    assert made.name in [model.name for model in local_models()]


def test_the_same_content_elsewhere_is_the_same_model(file: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    made = import_gguf(file)
    copy = home / "copy.gguf"
    shutil.copy(file, copy)
    monkeypatch.setattr(import_once, "convert", no_reading)
    assert import_gguf(copy) == made
    monkeypatch.setattr(import_once, "_sha256", no_reading)
    assert import_gguf(copy) == made


def test_a_file_that_changed_is_another_model(file: Path):
    first = import_gguf(file)
    write_tiny(file, seed=1)
    assert directory_of(str(file)) is None
    with pytest.raises(ModelNotFound, match=r"is not on this machine\. Run `phalanx pull"):
        find(str(file))
    assert import_gguf(file) != first and first.exists()


def test_a_model_that_is_known_is_not_recorded_again(file: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    """The ranks of a server look for it at the same time, and would read what another is writing."""
    made = import_gguf(file)
    origin = origin_of(made)
    assert origin is not None
    monkeypatch.setattr(import_once, "record", no_reading)
    for files in ((), recorded_files(made)):
        assert import_once.import_once("other", origin, files, no_reading) == made


def test_an_imported_model_is_removed_by_its_name(file: Path):
    made = import_gguf(file)
    assert remove(made.name) > 0 and not made.exists() and file.exists()
    assert [model.name for model in local_models()] == ["demo"]


class Interrupted(Exception):
    """Ctrl-C, or the end of a process, at some moment."""


def interrupt_at(n: int) -> Callable[[PullProgress], None]:
    """A report that ends an import at its nth piece of a tensor."""
    left = n

    def report(progress: PullProgress) -> None:
        nonlocal left
        left -= progress.status.startswith("importing")
        if left == 0:
            raise Interrupted

    return report


def test_an_import_that_is_interrupted_goes_on(file: Path, monkeypatch: pytest.MonkeyPatch):
    """At every one of its pieces; what is left is listed, is not served, and has what was made so far."""
    wanted = import_gguf(file)
    whole = {entry.name: entry.read_bytes() for entry in wanted.iterdir()}
    remove(wanted.name)
    monkeypatch.setattr(import_journal, "SYNC", 1)
    monkeypatch.setattr(import_once, "_sha256", read_once := counted(import_once._sha256))
    for n in range(1, 20):
        with pytest.raises(Interrupted):
            import_gguf(file, interrupt_at(2 if n == 1 else 3))  # the first piece is then what is there already
        assert entries_of(imports_folder()) == [f"{BEGUN}{wanted.name}"] and directory_of(str(file)) is None
        assert imported_name(f"{BEGUN}{wanted.name}") is None, "it is not served by this name either"
        begun = find(str(file))
        assert (begun.name, begun.lacks) == (str(file), "model.safetensors")
        assert [model.name for model in local_models()] == ["demo", str(file)]
        journal = (begun.path / gguf_import.JOURNAL).read_text().splitlines()
        assert len(journal) == 1 + n, "each interrupted import has made one tensor more"
    assert import_gguf(file) == wanted and entries_of(imports_folder()) == [wanted.name]
    assert {entry.name: entry.read_bytes() for entry in wanted.iterdir()} == whole
    assert read_once.calls == 1, "the file's digest is known while it has not changed"


class counted:
    def __init__(self, act: Callable[..., str]) -> None:
        self.act, self.calls = act, 0

    def __call__(self, *given: object) -> str:
        self.calls += 1
        return self.act(*given)


def interrupted(file: Path) -> Path:
    """The folder of an import that was interrupted."""
    with pytest.raises(Interrupted):
        import_gguf(file, interrupt_at(8))
    (name,) = (name for name in entries_of(imports_folder()) if name.startswith(BEGUN))
    return imports_folder() / name


@pytest.mark.parametrize("damage", ["", "{", '"other"\n["blk.0.attn_k.weight", null]\n', '"other"', "[1]\n[2]\n"])
def test_a_journal_that_is_not_this_imports_counts_for_nothing(
    damage: str, file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(import_journal, "SYNC", 1)
    folder = interrupted(file)
    (folder / gguf_import.JOURNAL).write_text(damage)
    (folder / "model.safetensors").write_bytes(b"half")
    made = import_gguf(file)
    convert(file, file.with_name("other"))
    assert (made / "model.safetensors").read_bytes() == (file.with_name("other") / "model.safetensors").read_bytes()


def test_a_file_that_changed_in_an_interrupted_import_is_begun_anew(file: Path, monkeypatch: pytest.MonkeyPatch):
    """Though the first content is there again: some tensors may be made of the other."""
    monkeypatch.setattr(import_journal, "SYNC", 1)
    data = file.read_bytes()
    folder = interrupted(file)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64] + bytes(64))
    file.write_bytes(data[:-64] + bytes(64))
    file.write_bytes(data)
    made = import_gguf(file)
    assert entries_of(imports_folder()) == [made.name]
    convert(file, file.with_name("other"))
    assert (made / "model.safetensors").read_bytes() == (file.with_name("other") / "model.safetensors").read_bytes()


def test_an_unfinished_import_of_a_file_that_was_replaced_is_removed(file: Path):
    """It could neither be finished nor told from the new one: both have the file's name."""
    interrupted(file)
    write_tiny(file, seed=9)
    made = import_gguf(file)
    assert entries_of(imports_folder()) == [made.name] and [model.name for model in local_models()] == [
        "demo",
        made.name,
    ]


def test_an_unfinished_import_is_removed_by_its_files_name(file: Path):
    folder = interrupted(file)
    assert remove(str(file)) > 0 and not folder.exists() and file.exists()
    assert [model.name for model in local_models()] == ["demo"]


def test_a_file_that_changes_while_it_is_imported_is_refused(file: Path):
    data, copy = file.read_bytes(), file.with_name("copy")

    def rewrite(progress: PullProgress) -> None:
        if progress.status.startswith("importing"):
            file.write_bytes(data)

    def exchange(progress: PullProgress) -> None:
        if progress.status.startswith("importing"):
            copy.write_bytes(data)
            copy.replace(file)

    for change in (rewrite, exchange):
        with pytest.raises(WeightsError, match=r"Tiny one\.gguf changed while it was imported"):
            import_gguf(file, change)
        assert entries_of(imports_folder()) == []
    assert import_gguf(file).exists()


def test_a_file_with_the_size_and_time_of_another_is_another(file: Path):
    """As copies that keep times are."""
    first, before = import_gguf(file), file.stat()
    write_tiny(file, seed=1)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size and directory_of(str(file)) is None and import_gguf(file) != first


def test_two_imports_of_a_file_make_it_once(file: Path):
    """The second waits for the first; one of another file does not."""
    begun, goes_on, made, said = threading.Event(), threading.Event(), [], []
    other = file.with_name("other.gguf")
    write_tiny(other, seed=1)

    def hold(progress: PullProgress) -> None:
        if progress.status.startswith("importing"):
            begun.set()
            assert goes_on.wait(60)

    def see(progress: PullProgress) -> None:
        said.append(progress.status)
        if progress.status.startswith("waiting"):
            goes_on.set()

    threads = [
        threading.Thread(target=lambda report=report: made.append(import_gguf(file, report))) for report in (hold, see)
    ]
    threads[0].start()
    assert begun.wait(60)
    assert import_gguf(other).exists()
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 2 and made[0] == made[1] and "waiting for another import of this model" in said
    assert not any(status.startswith("importing") for status in said) and len(entries_of(imports_folder())) == 2


def test_other_users_cannot_enter_the_folder_of_an_import(file: Path):
    """Compiled code of GPUs lies beside it, which is not taken from a folder that others may enter."""
    import_gguf(file)
    assert own_cache().stat().st_mode & 0o077 == 0


def test_a_models_folder_that_cannot_be_written_serves_what_it_has(file: Path, monkeypatch: pytest.MonkeyPatch):
    made, copy = import_gguf(file), file.with_name("copy.gguf")
    shutil.copy(file, copy)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "x")

    monkeypatch.setattr(import_once, "record", refuse)
    assert import_gguf(copy) == made and import_gguf(file) == made
    write_tiny(copy, seed=1)
    with pytest.raises(
        ModelError,
        match=r"copy\.gguf could not be imported: x: Permission denied\. .* The import continues where it stopped",
    ):
        import_gguf(copy)


@pytest.mark.parametrize("name", ["名" * 60, "a\nb", "-x", "...", " ", "a'b;c", "é" * 120])
def test_any_files_name_makes_a_name_that_is_found(name: str, home: Path):
    file = home / f"{name}.gguf"
    write_tiny(file)
    made = import_gguf(file)
    assert directory_of(made.name) == made == directory_of(str(file)) and "\n" not in made.name
    assert not made.name.startswith(("-", ".")) and len(f"{BEGUN}{made.name}".encode()) < 255
    assert directory_for("x", "0" * 64).name == "x-000000000000"


def test_a_folder_whose_name_is_not_utf_8(file: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    folder = home / os.fsdecode(b"d\xfe")
    folder.mkdir()
    monkeypatch.chdir(folder)
    file.rename("x.gguf")
    with pytest.raises(Interrupted):
        import_gguf(Path("x.gguf"), interrupt_at(2))
    assert find("x.gguf").lacks
    made = import_gguf(Path("x.gguf"))
    assert directory_of("x.gguf") == made and entries_of(imports_folder()) == [made.name]


def test_a_link_to_a_file_is_the_file(file: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    made = import_gguf(file)
    (home / "link.gguf").symlink_to(file)
    monkeypatch.setattr(import_once, "_sha256", no_reading)
    assert resolve("link.gguf") == made


def test_what_was_quantised_again_is_recorded_and_shown(home: Path, capsys: pytest.CaptureFixture[str]):
    write_tiny(home / "x.gguf", kind="Q6_K")
    made = resolve("x.gguf")
    origin = origin_of(made)
    assert origin is not None and len(origin.requantised) == 15
    worst = max(origin.requantised, key=lambda name: origin.requantised[name])
    show.command("x.gguf")
    said = capsys.readouterr().out
    assert f"15 tensors, to 8 bits; the largest error is {origin.requantised[worst]:.2g} ({worst})" in said
    assert str(made / ORIGIN) in said and str(home / "x.gguf") in said
    assert json.loads((made / ORIGIN).read_text())["requantised"] == origin.requantised


def rows(said: str) -> list[str]:
    return [" ".join(line.split()) for line in said.splitlines()]


def test_a_file_is_shown_before_it_is_imported(file: Path, capsys: pytest.CaptureFixture[str]):
    show.command(str(file))
    before = rows(capsys.readouterr().out)
    assert entries_of(imports_folder()) == []
    import_gguf(file)
    show.command(str(file))
    after = rows(capsys.readouterr().out)
    same = [line for line in after if line.startswith(("size", "family", "bits", "context", "fits here"))]
    assert len(same) == 5 and set(same) <= set(before)
    assert any(line.startswith("imported ") and f"phalanx pull {file}" in line for line in before)
    file.write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match="is damaged"):
        show.command(str(file))


def test_the_disk_is_checked_first(file: Path, monkeypatch: pytest.MonkeyPatch):
    full = lambda _: shutil._ntuple_diskusage(10, 10, 0)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(gguf_import.shutil, "disk_usage", full)
        with pytest.raises(ModelError, match=r"Tiny one.gguf needs 0.00 GiB of disk, but .* has 0.00 GiB free"):
            import_gguf(file)
    assert entries_of(imports_folder()) == []
    folder = interrupted(file)
    monkeypatch.setattr(gguf_import.shutil, "disk_usage", full)
    with pytest.raises(ModelError, match="of disk, but"):
        import_gguf(file)
    assert folder.exists(), "what was made so far stays"


def test_a_folder_that_cannot_be_written(file: Path, home: Path):
    (home / "cache").write_text("a file")
    with pytest.raises(ModelError, match=r"could not be imported: .*cache.*XDG_CACHE_HOME"):
        import_gguf(file)


def test_a_file_that_is_cut_while_it_is_imported(file: Path, home: Path):
    def cut(progress: PullProgress) -> None:
        os.truncate(file, file.stat().st_size - 4096)

    with pytest.raises(WeightsError, match=r"Tiny one.gguf became shorter while it was read"):
        convert(file, home / "made", cut)


def test_an_import_without_its_record_is_made_anew(file: Path):
    made = import_gguf(file)
    for damage in (b"{", b""):
        (made / ORIGIN).write_bytes(damage)
        assert directory_of(str(file)) is None
        assert import_gguf(file) == made and directory_of(str(file)) == made
