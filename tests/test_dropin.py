"""`ShardDataset[i]` is what ``torchvision.datasets.ImageFolder[i]`` was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from packer import PackOptions, pack
from readers import ShardDataset


def packed(source: Path, out: Path, container: str, **options: Any) -> ShardDataset:
    report = pack(source, out, PackOptions(**({"format": container, "workers": 1} | options)))
    assert report.rejected == 0
    return ShardDataset(out)


def check_same(ours: ShardDataset, theirs: ImageFolder, indices: Iterable[int] | None = None) -> None:
    root = Path(theirs.root)
    assert len(ours) == len(theirs) > 0
    assert ours.classes == theirs.classes
    assert ours.class_to_idx == theirs.class_to_idx
    assert ours.targets.tolist() == theirs.targets
    assert list(ours.samples) == [(str(Path(path).relative_to(root)), label) for path, label in theirs.samples]
    for index in range(len(theirs)) if indices is None else indices:
        image, target = ours[index]
        expected_image, expected_target = theirs[index]
        assert (image.mode, image.size, target) == (expected_image.mode, expected_image.size, expected_target)
        assert image.tobytes() == expected_image.tobytes(), theirs.samples[index]


def test_photographs(shared_data: Path, container: str, tmp_path: Path) -> None:
    source = shared_data / "photos"
    ours = packed(source, tmp_path / "set", container, shard_size="1MiB", check="header")
    check_same(ours, ImageFolder(source), [*range(0, len(ours), 7), -1])


@pytest.fixture(scope="module")
def awkward(tmp_path_factory: pytest.TempPathFactory, draw_image: Callable[..., bytes]) -> Path:
    """Names, folders, formats and modes that make two listings differ; all of it is for ImageFolder to take."""
    root = tmp_path_factory.mktemp("awkward") / "source"
    names = [
        "a/b/x.jpg", "a/b-c/x.jpg", "a/b.d/x.jpg", "a/b/z/x.jpg", "a/b.jpg", "a/b-.jpg", "a/B.JPG", "a/b/x.JPEG",
        "a-b/x.jpg", "a b/x y.jpg", "A/x.jpg", "a/é.jpg", "a/e\u0301.jpg", "a/\udcff\udcfe.jpg", "\udce9/x.jpg",
        "é/x.jpg", "10/1.jpg", "9/10.jpg", "9/9.jpg", "9/1.tar.jpg", "9/x.y/x.jpg", "a/new\nline.jpg",
        "a/tab\t.jpg", "a/q\"'.jpg",
        "a/comma,semi;.jpg", "a/back\\slash.jpg", "z/deep/" + "/".join("d" * 60 for _ in range(6)) + "/x.jpg",
        "z/" + "n" * 250 + ".jpg",
    ]  # fmt: skip
    files: dict[str, bytes] = {name: draw_image(number) for number, name in enumerate(names)}
    for number, (extension, format, mode) in enumerate(
        [
            ("png", "PNG", "L"), ("png", "PNG", "P"), ("png", "PNG", "1"), ("PNG", "PNG", "RGB"), ("bmp", "BMP", "RGB"),
            ("ppm", "PPM", "RGB"), ("pgm", "PPM", "L"), ("tif", "TIFF", "CMYK"), ("tiff", "TIFF", "RGB"),
            ("webp", "WEBP", "RGB"), ("jpeg", "JPEG", "CMYK"), ("jpg", "JPEG", "L"), ("jpg", "PNG", "RGB"),
            ("png", "JPEG", "RGB"), ("jpg", "GIF", "P"),
        ]
    ):  # fmt: skip
        files[f"formats/{number:02d}.{extension}"] = draw_image(100 + number, mode=mode, format=format)
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (root / "a/notes.txt").write_text("no image")
    (root / "top.jpg").write_bytes(draw_image(200))
    (root / "links").mkdir()
    os.symlink("../a/b", root / "links/folder")
    os.symlink("../a/b.jpg", root / "links/file.jpg")
    return root


def test_awkward_tree(awkward: Path, container: str, tmp_path: Path) -> None:
    ours = packed(awkward, tmp_path / "set", container, shard_records=7)
    check_same(ours, ImageFolder(awkward))


def test_case_76_numeric_class_names_sort_as_text(
    container: str, tmp_path: Path, make_tree: Callable[..., Path], draw_image: Callable[..., bytes]
) -> None:
    source = make_tree(tmp_path / "source", {f"{n}/x.jpg": draw_image(n) for n in range(13)})
    ours = packed(source, tmp_path / "set", container)
    check_same(ours, ImageFolder(source))
    assert ours.class_to_idx["10"] == 2


def test_empty_class_keeps_its_index(
    container: str, tmp_path: Path, make_tree: Callable[..., Path], draw_image: Callable[..., bytes]
) -> None:
    source = make_tree(tmp_path / "source", {"a/1.jpg": draw_image(1), "b": None, "c/1.jpg": draw_image(2)})
    ours = packed(source, tmp_path / "set", container)
    check_same(ours, ImageFolder(source, allow_empty=True))
    assert ours[1].target == 2


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, image_tree: Callable[..., Path]) -> tuple[Path, dict[str, Path]]:
    folder = tmp_path_factory.mktemp("plain")
    source = image_tree(folder / "source", classes=3, per_class=7)
    for name in ("hdf5", "lmdb"):
        pack(source, folder / name, PackOptions(format=name, workers=1, shard_records=5))
    return source, {name: folder / name for name in ("hdf5", "lmdb")}


def test_transforms(plain: tuple[Path, dict[str, Path]], container: str) -> None:
    transform = v2.Compose([v2.RandomResizedCrop(8), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    theirs = ImageFolder(plain[0], transform, lambda target: target + 100)
    ours = ShardDataset(plain[1][container], transform, lambda target: target + 100)
    for index in range(21):
        torch.manual_seed(index)
        expected_image, expected_target = theirs[index]
        torch.manual_seed(index)
        image, target = ours[index]
        assert image.equal(expected_image)
        assert target == expected_target >= 100


@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_of_the_user_gives_the_same_batches(
    plain: tuple[Path, dict[str, Path]], container: str, workers: int
) -> None:
    def batches(dataset: Any) -> list[Any]:
        options = {"multiprocessing_context": "fork"} if workers else {}
        generator = torch.Generator().manual_seed(7)
        return list(
            DataLoader(dataset, 4, shuffle=True, num_workers=workers, generator=generator, drop_last=True, **options)
        )

    transform = v2.PILToTensor()
    expected = batches(ImageFolder(plain[0], transform))
    found = batches(ShardDataset(plain[1][container], transform))
    assert len(found) == len(expected) == 5
    for (images, targets), (expected_images, expected_targets) in zip(found, expected, strict=True):
        assert images.equal(expected_images)
        assert targets.equal(expected_targets)


def test_tensor_decoding_is_pil_to_tensor(plain: tuple[Path, dict[str, Path]], container: str) -> None:
    theirs = ImageFolder(plain[0], v2.PILToTensor())
    ours = ShardDataset(plain[1][container], decode="tensor")
    assert all(ours[index].image.equal(theirs[index][0]) for index in range(21))
