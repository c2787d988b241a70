"""What the tests of both halves share: pictures drawn from a seed, trees of files, the command, plain reading."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import lmdb
import numpy as np
import pytest
from hypothesis import settings
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
CONTAINERS = ("hdf5", "lmdb")

# No deadline: two noisy cores. Derandomised: a red run is red again.
settings.register_profile("shardpack", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("shardpack")

#: Relative path -> content; None makes a folder.
Files = Mapping[str, bytes | None]


class PlainRecord(NamedTuple):
    """A record as plain h5py or lmdb gives it."""

    key: bytes
    image: bytes
    label: int


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root folder."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """``shared/data`` beside the repository: real photographs and odd files. Skips where it is not."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data beside the repository")
    return folder


@pytest.fixture(params=CONTAINERS)
def container(request: pytest.FixtureRequest) -> str:
    """Each container in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def draw_image() -> Callable[..., bytes]:
    """``draw_image(seed, size=(24, 16), mode="RGB", format="JPEG", **save) -> bytes``; size is (width, height)."""
    return _draw_image


def _draw_image(
    seed: int, size: tuple[int, int] = (24, 16), mode: str = "RGB", format: str = "JPEG", **save: Any
) -> bytes:
    # A few random blocks, enlarged: quick, different for each seed, and compressible as pictures are.
    blocks = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), np.uint8)
    image = Image.fromarray(blocks).resize(size, Image.Resampling.BILINEAR)
    if mode in ("LA", "RGBA"):
        image.putalpha(Image.fromarray(blocks[:, :, 0]).resize(size))
    file = io.BytesIO()
    image.convert(mode).save(file, format, **save)
    return file.getvalue()


@pytest.fixture(scope="session")
def make_tree() -> Callable[[Path, Files], Path]:
    """``make_tree(root, {"a/x.jpg": data, "empty": None}) -> root``: files, and folders where the data are None."""
    return _make_tree


def _make_tree(root: Path, files: Files) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = root / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return root


@pytest.fixture(scope="session")
def image_tree() -> Callable[..., Path]:
    """``image_tree(root, classes=2, per_class=3, size=(24, 16)) -> root``: ``c0/0000.jpg`` and so on, all different."""
    return _image_tree


def _image_tree(
    root: Path, classes: int = 2, per_class: int = 3, size: tuple[int, int] = (24, 16), format: str = "JPEG"
) -> Path:
    extension = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp"}[format]
    return _make_tree(
        root,
        {
            f"c{label}/{number:04d}.{extension}": _draw_image(label * per_class + number, size, format=format)
            for label in range(classes)
            for number in range(per_class)
        },
    )


@pytest.fixture(scope="session")
def run_pack() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_pack(*words, **subprocess_options) -> CompletedProcess``: the command, as a process of its own."""
    return _run_pack


def _run_pack(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packer", *(os.fspath(w) if isinstance(w, os.PathLike) else str(w) for w in words)]
    if "stdout" not in options and "stderr" not in options:
        options["capture_output"] = True
    return subprocess.run(command, **{"text": True, "timeout": 120, "cwd": REPOSITORY, "check": False, **options})


@pytest.fixture(scope="session")
def file_hashes() -> Callable[[Path], dict[str, str]]:
    """``file_hashes(folder) -> {relative path: SHA-256}``, hidden files too."""
    return _file_hashes


def _file_hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="session")
def plain_records() -> Callable[[Path], list[PlainRecord]]:
    """``plain_records(out) -> [PlainRecord]``: a set read with json, h5py and lmdb alone, nothing of ours."""
    return lambda out: list(_plain_records(out))


def _plain_records(out: Path) -> Iterator[PlainRecord]:
    manifest = json.loads((out / "manifest.json").read_bytes())
    for number, records in enumerate(manifest["shards"]["records"]):
        stem = out / "shards" / f"{number // 1000:04d}" / f"{number:07d}"
        if manifest["container"] == "hdf5":
            yield from _plain_hdf5(stem.with_suffix(".h5"))
        else:
            yield from _plain_lmdb(stem.with_suffix(".lmdb"), records)


def _plain_hdf5(path: Path) -> Iterator[PlainRecord]:
    with h5py.File(path, "r") as file:
        for row in file["index"][:]:
            image, key = (
                file["data"][int(row[f"{field}_offset"]) : int(row[f"{field}_offset"]) + int(row[f"{field}_length"])]
                for field in ("image", "key")
            )
            yield PlainRecord(key.tobytes(), image.tobytes(), int(row["label"]))


def _plain_lmdb(path: Path, records: int) -> Iterator[PlainRecord]:
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        header = json.loads(txn.get(b"header"))
        row_type = np.dtype(
            {
                "names": [name for name, _, _ in header["row"]],
                "formats": [kind for _, kind, _ in header["row"]],
                "offsets": [offset for _, _, offset in header["row"]],
                "itemsize": header["row_bytes"],
            }
        )
        blocks = range(-(-records // header["block_rows"]))
        rows = np.concatenate([np.frombuffer(txn.get(b"index/%06d" % n), row_type) for n in blocks] or [[]])
        assert len(rows) == records == header["records"]
        for position, row in enumerate(rows):
            name = b"%010d/" % position
            yield PlainRecord(txn.get(name + b"key"), txn.get(name + b"image"), int(row["label"]))
