"""`packer/publish.py` and the run around it: what is visible is whole and on disk; what is not ours is left alone."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packer import PackError, PackOptions, PackReport, PackUsageError, pack
from packer.publish import OutputFolder
from readers import ShardDataset

Tree = Callable[..., Path]
Hashes = Callable[[Path], dict[str, str]]


def packed(source: Path, out: Path, **options: Any) -> PackReport:
    """Pack in this process."""
    return pack(source, out, PackOptions(**{"workers": 1, "max_rejects": "100%", **options}))


@pytest.fixture
def source(tmp_path: Path, image_tree: Tree) -> Path:
    """Six images in two classes."""
    return image_tree(tmp_path / "s")


def everything(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Content, inode and time of all files below a folder."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


# -- order of effects


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(call, path) of every fsync and link, as they happen."""
    calls: list[tuple[str, str]] = []
    fsync, link = os.fsync, os.link

    def traced_fsync(fd: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def traced_link(source: str, target: str, **named: Any) -> None:
        calls.append(("link", f"{source} -> {target}"))
        link(source, target, **named)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "link", traced_link)
    return calls


@pytest.mark.parametrize("container", ["hdf5", "lmdb"])
def test_data_then_name_then_folder_then_receipt_then_manifest(
    tmp_path: Path, source: Path, trace: list[tuple[str, str]], container: str
) -> None:
    out = tmp_path / "o"
    packed(source, out, format=container, shard_records=2)
    links = [(at, *what.split(" -> ")) for at, (call, what) in enumerate(trace) if call == "link"]
    for at, private, final in links:
        assert ("fsync", private) in trace[:at], f"{final} was named before its data were on disk"
        assert ("fsync", os.path.dirname(final)) in trace[at:], f"the name {final} was never made durable"
    finals = [os.path.relpath(final, out) for _, _, final in links]
    for number in range(3):
        shard = next(n for n, name in enumerate(finals) if name.startswith(f"shards/0000/000000{number}."))
        receipt = finals.index(f".pack/receipts/0000/000000{number}.json")
        assert shard < receipt
        folder_synced = trace.index(("fsync", str(out / "shards/0000")), links[shard][0])
        assert folder_synced < links[receipt][0], "a receipt speaks of a shard whose name may be lost"
    assert finals[0] == ".pack/plan.json"
    assert finals[-1] == "manifest.json"
    # New folders are names in their parents, too.
    assert ("fsync", str(out / "shards")) in trace
    assert ("fsync", str(out)) in trace


def test_pieces_of_the_plan_are_on_disk_before_the_plan(
    tmp_path: Path, source: Path, trace: list[tuple[str, str]]
) -> None:
    out = tmp_path / "o"
    packed(source, out, shard_records=2)
    plan = next(n for n, (call, what) in enumerate(trace) if call == "link" and what.endswith("/.pack/plan.json"))
    for number in range(3):
        assert [what for call, what in trace[:plan] if call == "fsync" and f"/.pack/plan/0000/000000{number}." in what]


@pytest.mark.parametrize("container", ["hdf5", pytest.param("lmdb", marks=pytest.mark.slow)])
def test_a_failed_fsync_publishes_nothing_and_is_not_repeated(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, file_hashes: Hashes, container: str
) -> None:
    """Tried at every fsync of a run: W4. A second fsync on the same descriptor would report success falsely."""
    packed(source, tmp_path / "clean", format=container, shard_records=2)
    fsync = os.fsync
    for failing in range(200):
        out, calls = tmp_path / f"o{failing}", []

        def broken(fd: int, failing: int = failing, calls: list[str] = calls) -> None:
            calls.append(os.readlink(f"/proc/self/fd/{fd}"))
            if len(calls) == failing + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fsync(fd)

        monkeypatch.setattr(os, "fsync", broken)
        message = ""
        try:
            packed(source, out, format=container, shard_records=2)
        except PackError as error:
            message = str(error)
        monkeypatch.setattr(os, "fsync", fsync)
        failed = calls[failing : failing + 1]
        assert not failed or "Input/output error" in message
        assert not [path for path in calls[failing + 1 :] if path in failed and "tmp-" in path]
        if not failed:
            assert failing > 20
            break
        shards = file_hashes(out / "shards") if (out / "shards").exists() else {}
        clean = file_hashes(tmp_path / "clean" / "shards")
        assert all(clean[name] == found for name, found in shards.items())
        assert list((out / ".pack" / "tmp").glob("*")) == []
        packed(source, out, format=container, shard_records=2)
        assert file_hashes(out) == file_hashes(tmp_path / "clean")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_file_systems_without_hard_links(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, file_hashes: Hashes, code: int
) -> None:
    packed(source, tmp_path / "with")

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refused)
    packed(source, tmp_path / "without")
    assert file_hashes(tmp_path / "without") == file_hashes(tmp_path / "with")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_file_systems_without_locks(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    import fcntl

    def refused(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    assert packed(source, tmp_path / "o").packed == 6


def test_no_room_before_the_first_byte(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packer import run

    monkeypatch.setattr(run, "free_bytes", lambda path: 1000)
    with pytest.raises(PackError, match=r"needs about [\d,]+ bytes, 1,000 are free"):
        packed(source, tmp_path / "o")
    assert not (tmp_path / "o/shards").exists()
    monkeypatch.undo()
    assert packed(source, tmp_path / "o").packed == 6


# -- what OUT may be


@pytest.mark.parametrize("options", [{}, {"overwrite": True}])
@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": b"x"}, {".hidden": b"x"}, {"folder/x": b"x"}, {"empty": None}, {"manifest.json": b"{}"},
        {"manifest.json": b'{"format": "other"}', "shards/0000/0000000.h5": b"x"}, {"shards/0000/0000000.h5": b"x"},
    ],
)  # fmt: skip
def test_a_folder_that_is_not_ours_is_never_touched(
    tmp_path: Path, source: Path, make_tree: Tree, files: dict[str, bytes | None], options: dict[str, Any]
) -> None:
    out = make_tree(tmp_path / "o", files)
    before, names = everything(out), sorted(map(str, out.rglob("*")))
    with pytest.raises(PackUsageError, match="is not empty and holds no packed set: it is left alone"):
        packed(source, out, **options)
    assert everything(out) == before
    assert sorted(map(str, out.rglob("*"))) == names


def test_output_that_is_a_file_or_a_broken_link(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(PackUsageError, match="is not a folder"):
            packed(source, tmp_path / name)
    with pytest.raises(PackError):
        packed(source, tmp_path / "file" / "below")
    assert (tmp_path / "file").read_bytes() == b"x"
    assert not (tmp_path / "nowhere").exists()


def test_output_in_the_source_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    for out in (source, source / "o", source / "c0" / "o", tmp_path / "link", tmp_path / "link" / "o"):
        with pytest.raises(PackUsageError, match="lies in the source"):
            packed(source, out)
    assert sorted(path.name for path in source.iterdir()) == ["c0", "c1"]


def test_output_beside_a_source_of_a_longer_name(tmp_path: Path, image_tree: Tree) -> None:
    # "photos-packed" begins with "photos" and does not lie in it.
    assert packed(image_tree(tmp_path / "photos"), tmp_path / "photos-packed").packed == 6


@pytest.mark.parametrize("out", ["o", "o/", "./x/../o", "new/folders/o"])
def test_spellings_of_the_output(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    assert pack("s", out, PackOptions(workers=1)).packed == 6
    assert len(ShardDataset(out, decode="bytes")) == 6


@pytest.fixture(params=[0o022, 0o027, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Each common umask in turn."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_modes_follow_the_umask(tmp_path: Path, make_tree: Tree, draw_image: Any, umask: int) -> None:
    source = make_tree(tmp_path / "s", {"c/a.jpg": draw_image(1), "c/b.jpg": b""})
    packed(source, tmp_path / "o")
    for path in [tmp_path / "o", *(tmp_path / "o").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~umask, path
    assert os.umask(umask) == umask


# -- doing it again


def test_again_over_a_finished_set_changes_nothing(tmp_path: Path, source: Path) -> None:
    packed(source, tmp_path / "o", shard_records=2)
    before = everything(tmp_path / "o")
    report = packed(source, tmp_path / "o", shard_records=2)
    assert (report.already_done, report.packed, report.shards) == (True, 6, 3)
    assert everything(tmp_path / "o") == before
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["manifest.json", "shards"]


CHANGES: dict[str, Callable[[Path], object]] = {
    "one more": lambda s: (s / "c0/0001a.jpg").write_bytes((s / "c0/0001.jpg").read_bytes()),
    "one less": lambda s: (s / "c0/0001.jpg").unlink(),
    "the last one less": lambda s: (s / "c1/0002.jpg").unlink(),
    "another size": lambda s: (s / "c1/0001.jpg").write_bytes((s / "c1/0001.jpg").read_bytes() + b"\0"),
    "another name": lambda s: (s / "c1/0001.jpg").rename(s / "c1/0009.jpg"),
    "another class": lambda s: (s / "c1").rename(s / "c9"),
    "another order": lambda s: (s / "c0").rename(s / "d0"),
}
OTHERS: dict[str, dict[str, Any]] = {
    "shard_bytes": {"shard_size": 5000, "shard_records": None}, "shard_records": {"shard_records": 3},
    "check": {"check": "header"}, "max_pixels": {"max_pixels": 10_000}, "shuffle": {"shuffle": 3},
    "labels": {"labels": "none"}, "all_files": {"all_files": True}, "container": {"format": "lmdb"},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_finished_set_is_not_that_of_a_changed_source(tmp_path: Path, source: Path, change: str) -> None:
    packed(source, tmp_path / "o", shard_size=2000)
    before = everything(tmp_path / "o")
    CHANGES[change](source)
    with pytest.raises(PackError, match=r"was begun with other options|the source has changed") as caught:
        packed(source, tmp_path / "o", shard_size=2000)
    assert "--overwrite" in str(caught.value)
    assert everything(tmp_path / "o") == before, "a refused run left its traces in a finished set"
    packed(source, tmp_path / "o", shard_size=2000, overwrite=True)
    assert len(ShardDataset(tmp_path / "o", decode="bytes")) == sum(path.is_file() for path in source.rglob("*.jpg"))


@pytest.mark.parametrize("change", [*CHANGES, "another time"])
def test_a_begun_set_is_not_continued_with_a_changed_source(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, file_hashes: Hashes, change: str
) -> None:
    stop_before_the_manifest(monkeypatch, source, tmp_path / "o", shard_size=2000)
    before = file_hashes(tmp_path / "o")
    changes = {**CHANGES, "another time": lambda s: os.utime(s / "c1/0001.jpg", (1, 1))}
    changes[change](source)
    with pytest.raises(PackError, match=r"begun with other options|the source has changed since .*: '") as caught:
        packed(source, tmp_path / "o", shard_size=2000)
    assert "--overwrite" in str(caught.value)
    assert {n: h for n, h in file_hashes(tmp_path / "o").items() if "lock" not in n} == {
        n: h for n, h in before.items() if "lock" not in n
    }
    packed(source, tmp_path / "o", shard_size=2000, overwrite=True)
    packed(source, tmp_path / "clean", shard_size=2000)
    assert file_hashes(tmp_path / "o") == file_hashes(tmp_path / "clean")


def stop_before_the_manifest(monkeypatch: pytest.MonkeyPatch, source: Path, out: Path, **options: Any) -> None:
    """Pack all shards, and end there."""
    from packer import run

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run._Run, "_publish_manifest", stop)
        with pytest.raises(KeyboardInterrupt):
            packed(source, out, **options)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_other_options_are_refused_by_name(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, name: str, finished: bool
) -> None:
    if finished:
        packed(source, tmp_path / "o", shard_records=2)
    else:
        stop_before_the_manifest(monkeypatch, source, tmp_path / "o", shard_records=2)
    with pytest.raises(PackError, match=rf"other options: {name} was .*, is .*Use the same options"):
        packed(source, tmp_path / "o", **{"shard_records": 2, **OTHERS[name]})


@pytest.mark.parametrize("change", [{"workers": 2}, {"max_rejects": 0}])
def test_options_that_change_no_byte_may_change(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    stop_before_the_manifest(monkeypatch, source, tmp_path / "o", shard_records=2)
    assert packed(source, tmp_path / "o", shard_records=2, **change).resumed == 3


def test_class_map_that_changed_is_refused(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "map").write_text("c0\nc1\n")
    stop_before_the_manifest(monkeypatch, source, tmp_path / "o", class_map=tmp_path / "map")
    (tmp_path / "map").write_text("c1\nc0\n")
    with pytest.raises(PackError, match="other options: classes was"):
        packed(source, tmp_path / "o", class_map=tmp_path / "map")


# -- starting again


def test_overwrite_replaces_a_set_and_nothing_else(
    tmp_path: Path, source: Path, image_tree: Tree, file_hashes: Hashes
) -> None:
    packed(image_tree(tmp_path / "old", classes=3, per_class=9), tmp_path / "o", shard_records=2, format="lmdb")
    (tmp_path / "o" / "notes.txt").write_bytes(b"mine")
    (tmp_path / "o" / "shards" / "mine.h5").write_bytes(b"mine")
    packed(source, tmp_path / "o", overwrite=True)
    packed(source, tmp_path / "clean")
    found = file_hashes(tmp_path / "o")
    assert found.pop("notes.txt")
    assert found.pop("shards/mine.h5")
    assert found == file_hashes(tmp_path / "clean")


def test_overwrite_of_nothing_is_fine(tmp_path: Path, source: Path) -> None:
    assert packed(source, tmp_path / "o", overwrite=True).packed == 6


def test_overwrite_drops_old_rejects(tmp_path: Path, source: Path, make_tree: Tree) -> None:
    packed(make_tree(tmp_path / "old", {"c/a.jpg": b"", "c/b.jpg": b""}), tmp_path / "o")
    assert (tmp_path / "o/rejects.jsonl").exists()
    packed(source, tmp_path / "o", overwrite=True)
    assert not (tmp_path / "o/rejects.jsonl").exists()


def test_overwrite_with_nothing_to_pack_keeps_the_old_set(tmp_path: Path, source: Path) -> None:
    packed(source, tmp_path / "o")
    before = everything(tmp_path / "o")
    (tmp_path / "empty" / "c").mkdir(parents=True)
    with pytest.raises(PackError, match=r"no images found .*Nothing was written"):
        packed(tmp_path / "empty", tmp_path / "o", overwrite=True)
    with pytest.raises(PackUsageError):
        packed(tmp_path / "nowhere", tmp_path / "o", overwrite=True)
    assert everything(tmp_path / "o") == before
    assert len(ShardDataset(tmp_path / "o", decode="bytes")) == 6


@pytest.mark.parametrize("content", [b"", b"{", b'{\n"format":"shardpack",\n"version":1}', None])
def test_a_damaged_manifest_is_one_line_and_can_be_overwritten(
    tmp_path: Path, source: Path, content: bytes | None
) -> None:
    packed(source, tmp_path / "o")
    manifest = tmp_path / "o/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:300] if content is None else content)
    with pytest.raises(PackError) as caught:
        packed(source, tmp_path / "o")
    assert "\n" not in str(caught.value)
    if b'"format":"shardpack"' in manifest.read_bytes():
        assert packed(source, tmp_path / "o", overwrite=True).packed == 6


def test_temporaries_of_dead_runs_are_dropped(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_before_the_manifest(monkeypatch, source, tmp_path / "o")
    OutputFolder(str(tmp_path / "o")).private_file()
    packed(source, tmp_path / "o")
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["manifest.json", "shards"]


def test_receipts_hold_what_the_manifest_says(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, file_hashes: Hashes
) -> None:
    import json

    from blake3 import blake3

    stop_before_the_manifest(monkeypatch, source, tmp_path / "o", shard_records=2)
    receipts = [json.loads(path.read_bytes()) for path in sorted((tmp_path / "o/.pack/receipts/0000").iterdir())]
    packed(source, tmp_path / "o", shard_records=2)
    manifest = json.loads((tmp_path / "o/manifest.json").read_bytes())
    for name in ("records", "bytes", "shard_id", "blake3"):
        assert manifest["shards"][name] == [receipt[name] for receipt in receipts]
    shards = sorted((tmp_path / "o/shards/0000").iterdir())
    assert manifest["shards"]["blake3"] == [blake3(path.read_bytes()).hexdigest() for path in shards]
    assert manifest["shards"]["bytes"] == [path.stat().st_size for path in shards]


@pytest.mark.parametrize("begun", [False, True], ids=["foreign", "foreign with a .pack"])
def test_a_foreign_manifest_forbids_the_folder(tmp_path: Path, image_tree: Callable[..., Path], begun: bool) -> None:
    image_tree(tmp_path / "s")
    out = tmp_path / "o"
    (out / "shards/0000").mkdir(parents=True)
    (out / "manifest.json").write_text("{}")
    (out / "shards/0000/0000007.h5").write_text("mine")
    if begun:
        (out / ".pack").mkdir()
    for options in (PackOptions(), PackOptions(overwrite=True)):
        with pytest.raises(PackUsageError, match="left alone"):
            pack(tmp_path / "s", out, options)
    assert (out / "shards/0000/0000007.h5").read_text() == "mine"
    assert (out / "manifest.json").read_text() == "{}"


def test_empty_paths_are_refused_and_nothing_is_written(
    tmp_path: Path, image_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = image_tree(tmp_path / "s")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for words in ((source, ""), ("", tmp_path / "o")):
        with pytest.raises(PackUsageError, match="is empty: give a folder"):
            pack(*words)
    assert list((tmp_path / "here").iterdir()) == []
