"""`packer/sources/folder.py`: ImageFolder's order and labels; hidden files; links, pipes and folders that bite."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from packer import PackError, PackOptions, PackUsageError, pack
from packer.sources import folder as folder_module
from packer.sources.folder import FolderSource, Tally
from readers.layout import order_key

JPEG = b"\xff\xd8\xff"

#: Names that sort apart as text, as paths, and as numbers; with spaces, dots, "/"-neighbours ("." and "-" come
#: before it, "0" after), both Unicode forms of é, and bytes that are not UTF-8.
NAMES = (
    "a", "a-b", "a.b", "a b", "a!", "a0", "aa", "A", "b", "10", "2", "0", "é", "e\u0301", "~", "\udcff\udcfe",
    "x.jpg", "-", "日本", "\u2028", "a\tb", "a\nb", "%s", "😀", "\ue000",
)  # fmt: skip
EXTENSIONS = (".jpg", ".JPG", ".png", ".jpeg", ".webp", ".bmp", ".tiff", ".ppm")


def scan(root: Path, **options: Any) -> tuple[list[tuple[str, int]], Tally]:
    """(path, label) of every candidate, and the tally."""
    source = FolderSource(str(root), **options)
    labels = {name: label for label, name in enumerate(source.classes or ())}
    scanned = source.scan(labels, tempfile.TemporaryFile)
    return [(os.fsdecode(image.key), image.label) for image in scanned], scanned.tally


def image_folder(root: Path) -> list[tuple[str, int]]:
    """What torchvision makes of the same tree."""
    from torchvision.datasets import ImageFolder

    samples = ImageFolder(str(root), allow_empty=True).samples
    return [(os.path.relpath(path, root), label) for path, label in samples]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for the name of a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


# -- order and labels


def test_order_of_neighbouring_folders(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    names = ["a/x.jpg", "a/b/x.jpg", "a-b/x.jpg", "a-b/x/y.jpg", "a/b-c/x.jpg", "a/b/c/x.jpg", "a/b.jpg", "a/c.jpg"]
    root = make_tree(tmp_path / "s", {f"class/{name}": JPEG for name in names})
    found, _ = scan(root)
    assert found == image_folder(root)
    assert [name.removeprefix("class/") for name, _ in found] == [
        "a/b.jpg", "a/c.jpg", "a/x.jpg", "a-b/x.jpg", "a-b/x/y.jpg", "a/b/x.jpg", "a/b-c/x.jpg", "a/b/c/x.jpg",
    ]  # fmt: skip


@st.composite
def trees(draw: st.DrawFn) -> tuple[str, ...]:
    """Relative paths of files, at least one folder deep, none of them also a folder."""
    part = st.sampled_from(NAMES)
    file = st.builds("{}{}".format, part, st.sampled_from(EXTENSIONS))
    path = st.builds(lambda above, name: "/".join([*above, name]), st.lists(part, min_size=1, max_size=4), file)
    paths = draw(st.lists(path, min_size=1, max_size=14, unique=True))
    folders = {"/".join(p.split("/")[:n]) for p in paths for n in range(1, p.count("/") + 1)}
    return tuple(p for p in paths if p not in folders) or ("a/x.jpg",)


@given(paths=trees())
@example(paths=("a/x.jpg", "a-b/x.jpg", "a-b/x/1.jpg", "a/b/1.jpg", "c/a/1.jpg", "c/a-b/x/1.jpg", "c/a/b/1.jpg"))
@hypothesis_settings(max_examples=80)
def test_order_equals_imagefolder_over_any_tree(paths: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for path in paths:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
        found, tally = scan(root)
        assert found == image_folder(root)
        assert tally == Tally()
        # `ShardDataset.find` searches by this key, so records must lie in its order.
        assert found == sorted(found, key=lambda item: order_key(os.fsencode(item[0]), labelled=True))


@given(paths=trees())
@hypothesis_settings(max_examples=30)
def test_order_without_labels_is_that_of_one_class(paths: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "one"
        for path in paths:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
        found, _ = scan(root, labels="none")
        assert [(f"one/{path}", 0) for path, _ in found] == image_folder(Path(folder))
        assert {label for _, label in found} == {-1}
        assert found == sorted(found, key=lambda item: order_key(os.fsencode(item[0]), labelled=False))


def test_folders_too_large_for_memory_keep_the_order(
    tmp_path: Path, make_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_tree(tmp_path, {f"c/{name}{n}.jpg": b"" for name in NAMES for n in range(4)})
    monkeypatch.setattr(folder_module, "_NAMES_IN_MEMORY", 3)
    assert scan(root)[0] == image_folder(root)


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_a_folder_of_just_as_many_names_as_memory_holds(
    tmp_path: Path, make_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    root = make_tree(tmp_path, {f"c/{n}.jpg": b"" for n in range(count)})
    monkeypatch.setattr(folder_module, "_NAMES_IN_MEMORY", 3)
    assert [name for name, _ in scan(root)[0]] == [f"c/{n}.jpg" for n in range(count)]


def test_order_survives_packing(
    tmp_path: Path, make_tree: Callable[..., Path], draw_image: Callable[..., bytes],
    plain_records: Callable[..., Any], container: str,
) -> None:  # fmt: skip
    paths = [f"{top}/{below}{n}.jpg" for top in ("a", "a-b", "10", "2") for below in ("", "a-b/", "a/b/") for n in "21"]
    root = make_tree(tmp_path / "s", {path: draw_image(n) for n, path in enumerate(paths)})
    pack(root, tmp_path / "o", PackOptions(workers=1, shard_records=5, format=container))
    stored = [(os.fsdecode(r.key), r.label) for r in plain_records(tmp_path / "o")]
    assert stored == image_folder(root)


def test_links_to_folders_are_followed_as_imagefolder_does(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    make_tree(tmp_path / "elsewhere", {"1.jpg": JPEG, "deep/2.jpg": JPEG})
    root = make_tree(tmp_path / "s", {"a/x.jpg": JPEG})
    (root / "a" / "link").symlink_to(tmp_path / "elsewhere")
    (root / "b").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "file.jpg").symlink_to(root / "a" / "x.jpg")
    found, tally = scan(root)
    assert found == image_folder(root)
    assert len(found) == 6
    assert tally.loops == []


def test_case_79_names_are_opaque(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    names = ["22.0/1.1.png", 'c/a b,"c".jpg', "c/new\nline.jpg", "c/é.jpg", "c/e\u0301.jpg", "c/a.tar.jpg", "c/%41.jpg"]
    found, _ = scan(make_tree(tmp_path, dict.fromkeys(names, JPEG)))
    assert {name for name, _ in found} == set(names)
    assert found == image_folder(tmp_path)


def test_case_76_numeric_folders_sort_as_text(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    root = make_tree(tmp_path, {f"{n}/x.jpg": JPEG for n in range(13)})
    assert FolderSource(str(root)).classes == ["0", "1", "10", "11", "12", *"23456789"]
    assert scan(root)[0] == image_folder(root)


def test_labels_auto_without_folders_means_no_labels(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    root = make_tree(tmp_path, {"b.jpg": JPEG, "a.jpg": JPEG, ".git/x.jpg": JPEG})
    found, tally = scan(root)
    assert found == [("a.jpg", -1), ("b.jpg", -1)]
    assert tally.hidden == 1


def test_labels_folders_without_folders_is_refused(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    with pytest.raises(PackUsageError, match="holds no folders to take labels from"):
        FolderSource(str(make_tree(tmp_path, {"a.jpg": JPEG})), labels="folders")


def test_images_beside_the_class_folders_are_counted(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    root = make_tree(tmp_path, {"c/a.jpg": JPEG, "b.jpg": JPEG, "notes.txt": b""})
    found, tally = scan(root)
    assert [name for name, _ in found] == ["c/a.jpg"]
    assert tally.outside == 1
    assert tally.ignored == {".txt": 1}


# -- which files


def test_case_71_extensions_of_any_case_and_the_rarer_ones(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    taken = [".JPG", ".JPEG", ".jpeg", ".Png", ".WEBP", ".tif", ".bmp", ".jfif", ".avif", ".jp2", ".gif", ".TIFF"]
    left = [".txt", ".JSON", ".json", "", ".tar"]
    root = make_tree(tmp_path, {f"c/f{n}{ext}": JPEG for n, ext in enumerate(taken + left)})
    found, tally = scan(root)
    assert sorted(os.path.splitext(name)[1] for name, _ in found) == sorted(taken)
    assert tally.ignored == {".txt": 1, ".json": 2, "(none)": 1, ".tar": 1}
    assert tally.extra == {".jfif": 1, ".avif": 1, ".jp2": 1, ".gif": 1}


def test_all_files_takes_every_file_but_hidden_ones(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    root = make_tree(tmp_path, {"c/a.txt": b"", "c/b": b"", "c/.c": b"", "c/d.jpg": JPEG, "c/thumbs.DB": b""})
    found, tally = scan(root, all_files=True)
    assert [name for name, _ in found] == ["c/a.txt", "c/b", "c/d.jpg"]
    assert tally.hidden == 2
    assert not tally.ignored


def test_case_72_hidden_and_system_files_are_skipped(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    side = [
        "._x.jpg", ".DS_Store", "Thumbs.db", ".AppleDouble/y.jpg", "desktop.ini", "__MACOSX/a.jpg", "@eaDir/b.jpg",
        "lost+found/c.jpg", "Icon\r", ".hidden.jpg", "$RECYCLE.BIN/d.jpg",
    ]  # fmt: skip
    files = {"a/x.jpg": JPEG, "b/deep/x.jpg": JPEG}
    files |= {f"{above}{name}": JPEG for above in ("", "a/", "b/deep/") for name in side}
    found, tally = scan(make_tree(tmp_path, files))
    assert found == [("a/x.jpg", 0), ("b/deep/x.jpg", 1)]
    assert tally.hidden == 3 * len(side)
    assert not tally.ignored


def test_case_74_an_empty_class_folder_keeps_its_label(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    root = make_tree(tmp_path, {"a/x.jpg": JPEG, "b": None, "c/x.jpg": JPEG})
    assert FolderSource(str(root)).classes == ["a", "b", "c"]
    assert scan(root)[0] == [("a/x.jpg", 0), ("c/x.jpg", 2)] == image_folder(root)


# -- what must not hang or be followed


@pytest.mark.timeout(20)
@pytest.mark.parametrize("labels", ["folders", "none"])
def test_links_that_lead_back_end(tmp_path: Path, make_tree: Callable[..., Path], labels: str) -> None:
    root = make_tree(tmp_path / "s", {"a/x.jpg": JPEG, "a/deep/y.jpg": JPEG, "b/z.jpg": JPEG})
    (root / "a" / "self").symlink_to(root / "a")
    (root / "a" / "deep" / "up").symlink_to("..")
    (root / "a" / "deep" / "top").symlink_to(root)
    (root / "whole").symlink_to(root)
    (root / "b" / "dot").symlink_to(".")
    found, tally = scan(root, labels=labels)
    assert [name for name, _ in found] == ["a/x.jpg", "a/deep/y.jpg", "b/z.jpg"]
    assert sorted(tally.loops) == ["a/deep/top", "a/deep/up", "a/self", "b/dot", "whole"]


@pytest.mark.timeout(20)
def test_links_that_cross_end(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    root = make_tree(tmp_path / "s", {"a/x.jpg": JPEG, "b/y.jpg": JPEG})
    (root / "a" / "to_b").symlink_to(root / "b")
    (root / "b" / "to_a").symlink_to(root / "a")
    found, tally = scan(root)
    assert found == [("a/x.jpg", 0), ("a/to_b/y.jpg", 0), ("b/y.jpg", 1), ("b/to_a/x.jpg", 1)]
    assert sorted(tally.loops) == ["a/to_b/to_a", "b/to_a/to_b"]


@pytest.mark.timeout(20)
def test_a_link_to_a_folder_above_the_source_ends(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    root = make_tree(tmp_path / "above" / "s", {"a/x.jpg": JPEG})
    (root / "a" / "up").symlink_to(tmp_path / "above")
    found, tally = scan(root)
    assert found[0] == ("a/x.jpg", 0)
    assert len(found) <= 3
    assert tally.loops


@pytest.mark.timeout(20)
def test_a_source_that_is_a_link_is_no_loop(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    make_tree(tmp_path / "real", {"a/x.jpg": JPEG})
    (tmp_path / "s").symlink_to(tmp_path / "real")
    assert scan(tmp_path / "s")[0] == [("a/x.jpg", 0)]
    assert scan(tmp_path / "s", labels="none")[0] == [("a/x.jpg", -1)]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("labels", ["auto", "none"])
def test_pipes_sockets_and_broken_links_are_rejects(
    short_folder: Path, make_tree: Callable[..., Path], draw_image: Callable[..., bytes], labels: str, tmp_path: Path
) -> None:
    root = make_tree(short_folder / "s", {"c/good.jpg": draw_image(1), "c/folder.jpg/x.jpg": draw_image(2)})
    os.mkfifo(root / "c" / "pipe.jpg")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(root / "c" / "socket.jpg"))
    (root / "c" / "dangling.jpg").symlink_to("nowhere.jpg")
    (root / "c" / "itself.jpg").symlink_to("itself.jpg")
    (root / "c" / "device.jpg").symlink_to("/dev/null")
    try:
        report = pack(root, tmp_path / "o", PackOptions(workers=1, labels=labels, max_rejects="100%"))
    finally:
        server.close()
    assert report.packed == 2
    assert report.reasons == {"not-a-file": 3, "missing": 1, "unreadable": 1}


@pytest.mark.timeout(20)
def test_pipes_and_broken_links_as_class_folders(
    tmp_path: Path, make_tree: Callable[..., Path], draw_image: Callable[..., bytes]
) -> None:
    root = make_tree(tmp_path / "s", {"c/good.jpg": draw_image(1)})
    os.mkfifo(root / "pipe")
    (root / "dangling").symlink_to("nowhere")
    (root / "itself").symlink_to("itself")
    report = pack(root, tmp_path / "o", PackOptions(workers=1))
    assert (report.packed, report.classes) == (1, 1)


# -- folders that stop the run


@pytest.mark.parametrize(("train", "held_out"), [("train", "val"), ("training", "test"), ("train", "validation")])
def test_splits_are_not_classes(tmp_path: Path, make_tree: Callable[..., Path], train: str, held_out: str) -> None:
    root = make_tree(tmp_path / "s", {f"{train}/cat/a.jpg": JPEG, f"{held_out}/cat/b.jpg": JPEG})
    with pytest.raises(PackUsageError, match="two sets, not two classes") as caught:
        pack(root, tmp_path / "o", PackOptions(workers=1))
    assert f"--class-map OUT/{train}" in str(caught.value)
    assert not (tmp_path / "o").exists()


def test_splits_are_packed_when_no_labels_are_wanted(
    tmp_path: Path, make_tree: Callable[..., Path], draw_image: Callable[..., bytes]
) -> None:
    root = make_tree(tmp_path / "s", {"train/cat/a.jpg": draw_image(1), "val/cat/b.jpg": draw_image(2)})
    assert pack(root, tmp_path / "o", PackOptions(workers=1, labels="none")).packed == 2


def test_classes_named_train_and_test_without_common_folders_are_classes(
    tmp_path: Path, make_tree: Callable[..., Path]
) -> None:
    root = make_tree(tmp_path, {"train/locomotive/a.jpg": JPEG, "test/tube/b.jpg": JPEG, "val/c.jpg": JPEG})
    assert FolderSource(str(root)).classes == ["test", "train", "val"]


def deny(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make one folder unreadable, for root too."""
    scandir = os.scandir

    def denied(path: Any = ".") -> Any:
        if os.fspath(path) == str(folder):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)


@pytest.mark.parametrize("folder", ["a", "a/deep"])
def test_an_unreadable_folder_stops_the_run(
    tmp_path: Path, make_tree: Callable[..., Path], draw_image: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch, folder: str,
) -> None:  # fmt: skip
    root = make_tree(tmp_path / "s", {"a/x.jpg": draw_image(1), "a/deep/y.jpg": draw_image(2)})
    deny(monkeypatch, root / folder)
    with pytest.raises(PackError, match=r"cannot list folder .*Permission denied") as caught:
        pack(root, tmp_path / "o", PackOptions(workers=1))
    assert repr(str(root / folder)) in str(caught.value)
    assert caught.value.exit_status == 1
    assert not (tmp_path / "o" / "manifest.json").exists()
    monkeypatch.undo()
    assert pack(root, tmp_path / "o", PackOptions(workers=1)).packed == 2


def test_an_unreadable_source(tmp_path: Path, make_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_tree(tmp_path / "s", {"a/x.jpg": JPEG})
    deny(monkeypatch, root)
    with pytest.raises(PackError, match=r"cannot list folder .*Permission denied"):
        pack(root, tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permissions_stops_the_run(tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    root = make_tree(tmp_path / "s", {"a/x.jpg": JPEG, "b/x.jpg": JPEG})
    (root / "a").chmod(0)
    try:
        with pytest.raises(PackError, match="Permission denied"):
            pack(root, tmp_path / "o", PackOptions(workers=1))
    finally:
        (root / "a").chmod(0o755)


def test_a_missing_source_and_a_file_as_source(tmp_path: Path) -> None:
    (tmp_path / "file.jpg").write_bytes(JPEG)
    with pytest.raises(PackUsageError, match="does not exist"):
        pack(tmp_path / "none", tmp_path / "o")
    with pytest.raises(PackUsageError, match="is a file, not a folder"):
        pack(tmp_path / "file.jpg", tmp_path / "o")
    assert not (tmp_path / "o").exists()
