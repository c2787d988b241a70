"""What hurts people who pack images, case by case; the number in a name is that of the case.

Cases tested elsewhere carry their number there: 65 and 94 in packer/test_ingest.py, 68 in test_roundtrip.py, 71, 72,
74, 76 and 79 in packer/test_folder.py, 26 and 76 in packer/test_options.py, 86 in test_crash.py, 91 in
test_determinism.py.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from packer import PackError, PackOptions, PackReport, PackUsageError, TooManyRejectsError, pack
from packer.sources.folder import FolderSource
from packer.writers.hdf5 import Hdf5Writer
from readers import ShardCorruptError, ShardDataset, ShardNotFoundError, UnfinishedSetError
from readers.info import duplicates
from readers.verify import verify

Draw = Callable[..., bytes]
Tree = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
CONTAINERS = ("hdf5", "lmdb")
#: The second one only in a full run.
QUICK = ("hdf5", pytest.param("lmdb", marks=pytest.mark.slow))


def packed(source: Path, out: Path, **options: Any) -> PackReport:
    """Pack in this process; any number of rejects."""
    return pack(source, out, PackOptions(**{"workers": 1, "max_rejects": "100%", **options}))


def rejects(out: Path) -> dict[str, str]:
    """Reason by key."""
    lines = map(json.loads, (out / "rejects.jsonl").read_text().splitlines())
    return {line["key"]: line["reason"] for line in lines}


def good_files(draw_image: Draw, count: int, prefix: str = "c/good") -> dict[str, bytes]:
    """Some JPEGs with nothing wrong."""
    return {f"{prefix}{number:03d}.jpg": draw_image(number) for number in range(count)}


def link_many(root: Path, data: list[bytes], count: int, per_folder: int = 1000) -> Path:
    """``count`` names for a few files: hard links take no room."""
    root.mkdir(parents=True)
    for number in range(count):
        folder = root / f"c{number // per_folder:04d}"
        if number % per_folder == 0:
            folder.mkdir()
        first = root.parent / f"{root.name}-{number % len(data)}-{number // 20_000}"
        if not first.exists():
            first.write_bytes(data[number % len(data)])
        os.link(first, folder / f"{number:07d}.jpg")
    return root


def noise(size: int, seed: int = 0) -> bytes:
    """A file that passes for a JPEG with --check none, and does not compress."""
    return b"\xff\xd8\xff" + np.random.default_rng(seed).bytes(size - 3)


def limited(**limits: int) -> Callable[[], None]:
    """A ``preexec_fn`` that sets resource limits by name, such as ``FSIZE=10**6``."""

    def apply() -> None:
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))

    return apply


def peak_kib(code: str, *words: object) -> int:
    """Peak resident memory, in KiB, of a Python process that runs ``code``."""
    # Not ru_maxrss: that one starts with the memory of the process which forked.
    code += "\nprint(open('/proc/self/status').read())"
    command = [sys.executable, "-c", code, *map(str, words)]
    status = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    return int(status.split("VmHWM:")[1].split()[0])


PACK_CODE = """
import sys
from packer import PackOptions, pack
pack(sys.argv[1], sys.argv[2], PackOptions(workers=1, format=sys.argv[3], check=sys.argv[4]))
"""


# == A, B: what the shards are


def count_objects(path: Path) -> int:
    """HDF5 objects in a file."""
    names: list[str] = []
    with h5py.File(path) as file:
        file.visit(names.append)
    return len(names)


def test_case_8_number_of_hdf5_objects_is_constant(tmp_path: Path) -> None:
    counts = set()
    for images in (1, 10, 1000):
        source = link_many(tmp_path / f"s{images}", [noise(50)], images)
        packed(source, tmp_path / f"o{images}", check="none")
        counts.add(count_objects(tmp_path / f"o{images}" / "shards/0000/0000000.h5"))
    assert counts == {2}


@pytest.mark.slow
def test_case_8_writing_50000_images_does_not_slow_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = link_many(tmp_path / "s", [noise(60, seed) for seed in range(3)], 50_000)
    stamps = []
    add = Hdf5Writer.add

    def stamped(self: Hdf5Writer, record: Any) -> None:
        add(self, record)
        stamps.append(time.process_time())

    monkeypatch.setattr(Hdf5Writer, "add", stamped)
    packed(source, tmp_path / "o", check="none")
    assert count_objects(tmp_path / "o/shards/0000/0000000.h5") == 2
    assert stamps[-1] - stamps[45_000] < 1.5 * (stamps[5000] - stamps[0])


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_11_a_set_that_is_still_being_packed_says_so(
    tmp_path: Path, image_tree: Tree, monkeypatch: pytest.MonkeyPatch, container: str
) -> None:
    from packer import run

    source = image_tree(tmp_path / "s", per_class=5)
    publish = run._Run._publish_manifest
    seen = []

    def looked(self: Any, *rest: Any) -> Any:
        assert len(list((tmp_path / "o/shards").glob("*/*"))) == 5
        with pytest.raises(UnfinishedSetError, match="packing has not finished") as caught:
            ShardDataset(tmp_path / "o")
        seen.append(caught.value)
        return publish(self, *rest)

    monkeypatch.setattr(run._Run, "_publish_manifest", looked)
    packed(source, tmp_path / "o", format=container, shard_records=2)
    assert len(seen) == 1
    assert isinstance(seen[0], FileNotFoundError)
    assert len(ShardDataset(tmp_path / "o")) == 10


READ_CODE = """
import os, sys
from packer import PackOptions, pack
pack(sys.argv[1], sys.argv[2], PackOptions(workers=1, format=sys.argv[3], check="none"))
from readers.handles import open_shard
from readers.manifest import Manifest
manifest = Manifest.load(sys.argv[2])
total = 0
for number, records in enumerate(manifest.shard_records):
    shard = open_shard(sys.argv[2], manifest, number)
    total += sum(len(shard.image(position)[0]) for position in range(records))
print(total)
"""


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
    ("megabytes", "address_space"), [(20, 1 << 30), pytest.param(200, 6 << 30, marks=pytest.mark.slow)]
)
def test_case_24_maps_are_about_as_big_as_the_data(
    tmp_path: Path, container: str, megabytes: int, address_space: int
) -> None:
    source = link_many(tmp_path / "s", [noise(100_000)], megabytes * 10)
    done = subprocess.run(
        [sys.executable, "-c", READ_CODE, source, tmp_path / "o", container],
        preexec_fn=limited(AS=address_space), capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == megabytes * 1_000_000


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_25_a_finished_set_is_as_big_as_its_data(tmp_path: Path, container: str) -> None:
    source = link_many(tmp_path / "s", [noise(50_000, seed) for seed in range(4)], 400)
    report = packed(source, tmp_path / "o", format=container, check="none", shard_size="8MiB")
    files = [path for path in (tmp_path / "o").rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in files) == sorted(
        [".json", *[{"hdf5": ".h5", "lmdb": ".lmdb"}[container]] * 3]
    )
    apparent = sum(path.stat().st_size for path in files)
    allocated = sum(path.stat().st_blocks * 512 for path in files)
    assert report.payload_bytes == 400 * (50_000 + len("c0000/0000000.jpg"))
    assert apparent < report.payload_bytes * {"hdf5": 1.01, "lmdb": 1.07}[container]
    # No holes that a copy would fill; the file system may round up.
    assert 0.98 * apparent < allocated < 1.05 * apparent


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_30_one_flush_a_shard_not_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: str
) -> None:
    source = link_many(tmp_path / "s", [noise(500)], 2000)
    fsync, calls = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(fd) or fsync(fd))  # type: ignore[func-returns-value]
    packed(source, tmp_path / "one", format=container, check="none")
    a_shard, calls[:] = len(calls), []
    packed(source, tmp_path / "ten", format=container, check="none", shard_records=200)
    assert a_shard < 30
    assert len(calls) < 30 + 9 * 10


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("container", CONTAINERS)
def test_case_30_flushes_of_20000_images_counted_by_the_kernel(tmp_path: Path, container: str) -> None:
    source = link_many(tmp_path / "s", [noise(5000, seed) for seed in range(4)], 20_000)
    calls = "fsync,fdatasync,msync,sync,syncfs,sync_file_range"
    command = [
        "strace", "-f", "--seccomp-bpf", "-e", f"trace={calls}", "-o", str(tmp_path / "trace"), sys.executable, "-m",
        "packer", str(source), str(tmp_path / "o"), "--format", container, "--check", "none", "--workers", "1",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=200, capture_output=True)
    lines = [line for line in (tmp_path / "trace").read_text().splitlines() if "sync" in line]
    assert 0 < len(lines) < 20_000 / 500


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_32_a_path_of_700_bytes(tmp_path: Path, draw_image: Draw, plain_records: Any, container: str) -> None:
    folder = "/".join(["c", *["é" * 100] * 3, "x" * 90])
    key = f"{folder}/{'n' * 200}.jpg"
    assert len(os.fsencode(key)) > 700
    (tmp_path / "s" / folder).mkdir(parents=True)
    (tmp_path / "s" / key).write_bytes(draw_image(1))
    (tmp_path / "s" / "c" / "short.jpg").write_bytes(draw_image(2))
    packed(tmp_path / "s", tmp_path / "o", format=container)
    assert [record.key.decode() for record in plain_records(tmp_path / "o")] == ["c/short.jpg", key]
    dataset = ShardDataset(tmp_path / "o", decode="bytes")
    assert dataset.key(1) == key
    assert dataset.find(key) == 1


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("images", [1, 2, 4, 5, 6])
def test_case_33_length_is_the_number_of_images(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, container: str, images: int
) -> None:
    source = make_tree(tmp_path / "s", good_files(draw_image, images))
    report = packed(source, tmp_path / "o", format=container, shard_records=5)
    dataset = ShardDataset(tmp_path / "o", decode="bytes")
    assert len(dataset) == report.packed == images
    assert report.shards == (2 if images == 6 else 1)
    assert dataset[images - 1].image == draw_image(images - 1)
    for index in (images, -images - 1):
        with pytest.raises(IndexError):
            dataset[index]


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_33_a_set_whose_files_were_all_rejected(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, plain_records: Any, container: str
) -> None:
    source = make_tree(tmp_path / "s", {"c/a.jpg": b"", "c/b.jpg": b"", "c/c.jpg": b"", "d/x.jpg": draw_image(1)})
    report = packed(source, tmp_path / "o", format=container, shard_records=3)
    assert (report.packed, report.rejected, report.shards) == (1, 3, 2)
    assert len(plain_records(tmp_path / "o")) == 1
    (source / "d/x.jpg").write_bytes(b"")
    assert packed(source, tmp_path / "p", format=container, shard_records=3).packed == 0
    dataset = ShardDataset(tmp_path / "p", decode="bytes")
    assert len(dataset) == 0
    assert plain_records(tmp_path / "p") == list(dataset) == []
    assert verify(tmp_path / "p").ok


# == D: images in the wild


@pytest.fixture
def cut_files(draw_image: Draw) -> dict[str, bytes]:
    """Images cut in various places, among good ones."""
    jpeg, png = draw_image(1, (64, 48)), draw_image(2, (64, 48), format="PNG")
    return good_files(draw_image, 10) | {
        "c/half.jpg": jpeg[: len(jpeg) // 2], "c/half.png": png[: len(png) // 2], "c/end.jpg": jpeg[:-2],
    }  # fmt: skip


CUT = {"c/half.jpg": "truncated", "c/half.png": "truncated", "c/end.jpg": "truncated"}


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_54_truncated_images_are_skipped_and_listed(
    tmp_path: Path, make_tree: Tree, cut_files: dict[str, bytes], container: str
) -> None:
    report = packed(make_tree(tmp_path / "s", cut_files), tmp_path / "o", format=container)
    assert (report.packed, report.reasons) == (10, {"truncated": 3})
    assert rejects(tmp_path / "o") == CUT
    assert any("3 of 13 images rejected (truncated 3), first 'c/end.jpg'" in warning for warning in report.warnings)


def test_case_54_truncated_images_fail_a_strict_run(
    tmp_path: Path, make_tree: Tree, cut_files: dict[str, bytes], run_pack: Run
) -> None:
    source = make_tree(tmp_path / "s", cut_files)
    done = run_pack(source, tmp_path / "o", "--max-rejects", 0, "--workers", 1)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "3 of 13 images rejected" in done.stderr
    assert "'c/end.jpg': truncated" in done.stderr
    assert rejects(tmp_path / "o") == CUT
    with pytest.raises(UnfinishedSetError):
        ShardDataset(tmp_path / "o")
    # A larger bound continues what was begun.
    assert packed(source, tmp_path / "o").resumed == 1


def test_case_56_empty_files_are_called_empty(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    files = good_files(draw_image, 10) | {f"c/empty{n}.jpg": b"" for n in range(3)}
    source = make_tree(tmp_path / "s", files)
    assert packed(source, tmp_path / "o").packed == 10
    assert rejects(tmp_path / "o") == {f"c/empty{n}.jpg": "empty" for n in range(3)}
    with pytest.raises(TooManyRejectsError, match=r"first 'c/empty0.jpg': empty") as caught:
        packed(source, tmp_path / "strict", max_rejects=0)
    assert caught.value.exit_status == 1
    assert "0x" not in str(caught.value), "an object's address names no file"


def test_case_57_content_decides_not_the_name(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    formats = ("WEBP", "PNG", "GIF", "BMP", "TIFF", "JPEG")
    files = {f"c/{name}.jpg": draw_image(1, format=name) for name in formats}
    files |= {
        "c/html.jpg": b"<!DOCTYPE html><html><body>404</body></html>", "c/text.jpg": b"not here any more\n",
        "c/json.png": b'{"error": 404}', "c/git-lfs.jpg": b"version https://git-lfs.github.com/spec/v1\n",
    }  # fmt: skip
    report = packed(make_tree(tmp_path / "s", files), tmp_path / "o")
    assert report.formats == dict.fromkeys(formats, 1) == {**report.formats}
    assert report.reasons == {"not-an-image": 4}
    assert set(rejects(tmp_path / "o")) == {"c/html.jpg", "c/text.jpg", "c/json.png", "c/git-lfs.jpg"}


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_58_the_odd_files_of_imagenet(tmp_path: Path, make_tree: Tree, draw_image: Draw, container: str) -> None:
    files = {
        "n02105855/n02105855_2933.JPEG": draw_image(1, format="PNG"),
        "n02105855/cmyk.JPEG": draw_image(2, mode="CMYK"),
        "n02105855/gray.JPEG": draw_image(3, mode="L"),
        "n02105855/plain.JPEG": draw_image(4),
    }
    report = packed(make_tree(tmp_path / "s", files), tmp_path / "o", format=container)
    assert report.formats == {"JPEG": 3, "PNG": 1}
    assert report.modes == {"RGB": 2, "CMYK": 1, "L": 1}
    assert report.flags == {"cmyk": 1}
    raw = ShardDataset(tmp_path / "o", decode="bytes")
    assert {raw.key(i): raw[i].image for i in range(4)} == files
    assert {image.mode for image, _ in ShardDataset(tmp_path / "o")} == {"RGB"}


def test_case_61_transparency_of_every_mode_is_counted_and_flattened_alike(tmp_path: Path, make_tree: Tree) -> None:
    def saved(image: Image.Image, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, "PNG", **options)
        return file.getvalue()

    palette = Image.new("P", (2, 2))
    palette.putpalette([0, 255, 0] * 256)
    files = {
        "c/rgba.png": saved(Image.new("RGBA", (2, 2), (255, 0, 0, 0))),
        "c/la.png": saved(Image.new("LA", (2, 2), (128, 0))),
        "c/p.png": saved(palette, transparency=0),
    }
    report = packed(make_tree(tmp_path / "s", files), tmp_path / "o")
    assert report.flags == {"alpha": 3}
    assert any("3 images are transparent: decoding composites them over white" in line for line in report.warnings)
    assert {image.getpixel((0, 0)) for image, _ in ShardDataset(tmp_path / "o")} == {(255, 255, 255)}


def test_case_62_orientations_are_kept_and_counted(tmp_path: Path, make_tree: Tree) -> None:
    picture = Image.fromarray(np.arange(24 * 16 * 3, dtype=np.uint8).reshape(16, 24, 3))
    files = {}
    for value in (*range(1, 9), 0, 99):
        exif, file = Image.Exif(), io.BytesIO()
        exif[0x0112] = value
        picture.save(file, "JPEG", exif=exif.tobytes())
        files[f"c/{value:02d}.jpg"] = file.getvalue()
    report = packed(make_tree(tmp_path / "s", files), tmp_path / "o")
    assert report.orientations == {str(value): 1 for value in range(2, 9)}
    assert any("7 images carry an EXIF orientation" in warning for warning in report.warnings)
    sizes = [image.size for image, _ in ShardDataset(tmp_path / "o", exif_transpose=True)]
    assert sizes == [(24, 16)] * 5 + [(16, 24)] * 4 + [(24, 16)]
    assert {image.size for image, _ in ShardDataset(tmp_path / "o")} == {(24, 16)}


def broken_exif(jpeg: bytes) -> bytes:
    """The picture with an EXIF block that makes Pillow warn."""
    block = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(range(12)) * 3
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + jpeg[2:]


@pytest.mark.parametrize("strictness", ["error", pytest.param("always", marks=pytest.mark.slow)])
def test_case_63_broken_exif_is_counted_once_and_keeps_quiet(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, strictness: str
) -> None:
    source = make_tree(tmp_path / "s", {f"c/{n:03d}.jpg": broken_exif(draw_image(n)) for n in range(200)})
    command = [sys.executable, "-W", strictness, "-m", "packer", source, tmp_path / "o", "--shard-records", "50"]
    done = subprocess.run([*command, "--workers", "2"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "200 images have broken metadata" in done.stdout
    assert len(done.stdout.splitlines()) < 10
    for dataset in (ShardDataset(tmp_path / "o"), ShardDataset(tmp_path / "o", exif_transpose=True)):
        assert sum(1 for _ in dataset) == 200  # warnings are errors here


def white_png(width: int, height: int) -> bytes:
    """A one-bit PNG of one colour: tiny, whatever its size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = zlib.compress(bytes(height * (1 + (width + 7) // 8)), 1)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_case_65_a_huge_scan_among_small_images(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    source = make_tree(tmp_path / "s", good_files(draw_image, 10) | {"c/scan.png": white_png(14_000, 14_000)})
    assert packed(source, tmp_path / "o").packed == 10
    assert rejects(tmp_path / "o") == {"c/scan.png": "too-many-pixels"}
    report = packed(source, tmp_path / "p", max_pixels=200_000_000)
    assert (report.packed, report.flags) == (11, {"large": 1})
    assert any("more than 89,478,485 pixels" in line for line in report.warnings)


def animation(format: str, frames: int) -> bytes:
    """A few frames of different colours."""
    pictures = [Image.new("RGB", (8, 8), (80 * n, 255 - 80 * n, 40)) for n in range(frames)]
    file = io.BytesIO()
    pictures[0].save(file, format, save_all=True, append_images=pictures[1:])
    return file.getvalue()


def test_case_67_animations_and_pages_are_one_sample_each(tmp_path: Path, make_tree: Tree) -> None:
    files = {"c/a.gif": animation("GIF", 3), "c/b.webp": animation("WEBP", 3), "c/c.tiff": animation("TIFF", 2)}
    files["c/d.png"] = animation("PNG", 2)
    report = packed(make_tree(tmp_path / "s", files), tmp_path / "o")
    assert (report.packed, report.flags) == (4, {"animated": 4})
    assert any("4 images have several frames or pages: the first is the sample" in line for line in report.warnings)
    for image, _ in ShardDataset(tmp_path / "o"):
        red, green, _ = image.getpixel((4, 4))
        assert image.mode == "RGB"
        assert (red < 20, green > 235) == (True, True)


@pytest.mark.parametrize(("container", "most"), [("hdf5", 1.05), ("lmdb", 1.10)])
def test_case_69_a_set_of_photographs_is_hardly_larger_than_they_are(
    tmp_path: Path, shared_data: Path, container: str, most: float
) -> None:
    # Files of 27 KB on average; LMDB rounds each up to pages, which is why HDF5 is the default.
    photos = shared_data / "photos"
    report = packed(photos, tmp_path / "o", format=container, check="none")
    total = sum(path.stat().st_size for path in (tmp_path / "o").rglob("*") if path.is_file())
    assert total <= most * sum(path.stat().st_size for path in photos.rglob("*.jpg"))
    assert total >= report.payload_bytes


# == E: the source tree


def test_case_71_files_passed_over_are_listed_by_extension(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    names = [".JPG", ".JPEG", ".jpeg", ".Png", ".WEBP", ".tif", ".bmp", ".jfif", ".txt", ".txt2", ".TXT"]
    source = make_tree(tmp_path / "s", {f"c/f{n}{name}": draw_image(n) for n, name in enumerate(names)})
    report = packed(source, tmp_path / "o")
    assert report.packed == 8
    assert report.ignored == {".txt": 2, ".txt2": 1}
    assert report.listed == len(names)
    assert any(line == "ignored 3 files: .txt 2, .txt2 1" for line in report.lines())


def test_case_72_hidden_files_are_one_line(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    side = ("._x.jpg", ".DS_Store", "Thumbs.db", ".AppleDouble/y.jpg")
    files = {f"{above}{name}": b"" for above in ("", "a/", "b/") for name in side}
    source = make_tree(tmp_path / "s", files | {"a/1.jpg": draw_image(1), "b/1.jpg": draw_image(2)})
    report = packed(source, tmp_path / "o")
    assert (report.packed, report.classes, report.skipped) == (2, 2, 12)
    assert [line for line in report.lines() if "hidden or system" in line] == [
        "skipped 12 hidden or system files and folders"
    ]


@pytest.mark.parametrize("files_of_b", [{"b": None}, {"b/1.jpg": b"", "b/2.jpg": b"\xff\xd8\xff"}])
def test_case_74_a_class_without_images_keeps_its_index(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, files_of_b: dict[str, bytes | None]
) -> None:
    source = make_tree(tmp_path / "s", {"a/1.jpg": draw_image(1), "c/1.jpg": draw_image(2), **files_of_b})
    report = packed(source, tmp_path / "o")
    dataset = ShardDataset(tmp_path / "o", decode="bytes")
    assert dataset.classes == ["a", "b", "c"]
    assert [target for _, target in dataset] == [0, 2]
    assert any("1 class without images, first 'b'; their indices are kept" in line for line in report.warnings)


@pytest.mark.parametrize("labels", ["folders", "none"])
def test_case_81_one_listing_a_folder_one_stat_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: str
) -> None:
    source = link_many(tmp_path / "s", [noise(50)], 3000, per_folder=100)
    counts = {"scandir": 0, "stat": 0, "lstat": 0}

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*words: Any, **named: Any) -> Any:
            counts[name] += 1
            return real(*words, **named)

        return call

    for name in counts:
        monkeypatch.setattr(os, name, counted(name))
    folder = FolderSource(str(source), labels=labels)
    found = list(folder.scan(dict.fromkeys(folder.classes or (), 0), lambda: pytest.fail("no scratch needed")))
    monkeypatch.undo()
    assert len(found) == 3000
    assert counts["scandir"] <= 30 + 4
    assert counts["stat"] <= 3000 + 2 * 30 + 10
    assert counts["lstat"] <= 30 + 4


@pytest.mark.slow
@pytest.mark.parametrize("per_folder", [200, 200_000])
def test_case_81_scanning_200000_files_takes_little_memory(tmp_path: Path, per_folder: int) -> None:
    data = [noise(60)]
    few = link_many(tmp_path / "few", data, 1000, per_folder)
    many = link_many(tmp_path / "many", data, 200_000, per_folder)
    base = peak_kib(PACK_CODE, few, tmp_path / "o1", "hdf5", "none")
    peak = peak_kib(PACK_CODE, many, tmp_path / "o2", "hdf5", "none")
    assert (peak - base) * 1024 < 200 * 200_000


@pytest.mark.parametrize("container", QUICK)
def test_case_82_a_handful_of_files_even_while_packing(tmp_path: Path, container: str, run_pack: Run) -> None:
    source = link_many(tmp_path / "s", [noise(100)], 5000)
    scratch, out = tmp_path / "scratch", tmp_path / "o"
    scratch.mkdir()
    most, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.is_set():
            most = max(most, sum(len(files) for top in (out, scratch) for _, _, files in os.walk(top)))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    done = run_pack(
        source, out, "--format", container, "--check", "none", "--shard-records", 500, "--workers", 2,
        env={**os.environ, "TMPDIR": str(scratch)},
    )  # fmt: skip
    stop.set()
    watcher.join()
    assert done.returncode == 0, done.stderr
    assert 10 < most < 10 * 4 + 20
    assert len([path for path in out.rglob("*") if path.is_file()]) == 11
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_83_copies_are_kept_and_can_be_listed(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, container: str
) -> None:
    same = draw_image(1)
    files = {"a/1.jpg": same, "a/2.jpg": same, "b/1.jpg": same, "b/2.jpg": draw_image(2), "b/3.jpg": draw_image(3)}
    report = packed(make_tree(tmp_path / "s", files), tmp_path / "o", format=container, shard_records=2)
    assert report.packed == 5
    assert [list(group) for group in duplicates(tmp_path / "o")] == [["a/1.jpg", "a/2.jpg", "b/1.jpg"]]


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_84_the_same_base_name_in_different_folders(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, plain_records: Any, container: str
) -> None:
    names = ["a/1.jpg", "b/1.jpg", "a/1.png", "A/1.jpg", "a/a/1.jpg"]
    files = {name: draw_image(n) for n, name in enumerate(names)}
    source = make_tree(tmp_path / "s", files)
    if len(list(source.iterdir())) < 3:
        pytest.skip("this file system does not tell A from a")
    assert packed(source, tmp_path / "o", format=container).packed == 5
    assert {record.key.decode(): record.image for record in plain_records(tmp_path / "o")} == files


# == F: the job


def assert_no_room(done: subprocess.CompletedProcess[str], out: Path) -> None:
    """One line that names space, no death by signal, nothing left, nothing visible that is not whole."""
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "space" in done.stderr.lower() or "too large" in done.stderr.lower()
    assert "ake room" in done.stderr
    assert list((out / ".pack" / "tmp").glob("*")) == []
    with pytest.raises(UnfinishedSetError):
        ShardDataset(out)


@pytest.mark.parametrize(
    ("container", "workers"),
    [
        ("hdf5", 1), ("lmdb", 4), pytest.param("hdf5", 4, marks=pytest.mark.slow),
        pytest.param("lmdb", 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_case_89_no_room_under_a_file_size_limit(
    tmp_path: Path, run_pack: Run, container: str, workers: int, file_hashes: Any
) -> None:
    source = link_many(tmp_path / "s", [noise(50_000, seed) for seed in range(3)], 60)
    options = ["--format", container, "--check", "none", "--shard-records", 20, "--workers", workers]
    done = run_pack(source, tmp_path / "o", *options, preexec_fn=limited(FSIZE=600_000))
    assert_no_room(done, tmp_path / "o")
    done = run_pack(source, tmp_path / "o", *options)
    assert done.returncode == 0, done.stderr
    packed(source, tmp_path / "clean", format=container, check="none", shard_records=20)
    assert file_hashes(tmp_path / "o") == file_hashes(tmp_path / "clean")


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("limit", [100, 5000, 20_000, 70_000, 150_000, 999_999, 1_003_000])
def test_case_89_no_room_wherever_it_ends(
    tmp_path: Path, container: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = link_many(tmp_path / "s", [noise(50_000, seed) for seed in range(3)], 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(PackError, match=r"(?i)cannot write to .*(too large|no space).*Make room"):
            packed(source, tmp_path / "o", format=container, check="none")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "o" / ".pack" / "tmp").glob("*")) == []
    assert packed(source, tmp_path / "o", format=container, check="none").packed == 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """``small_disk(bytes) -> Path``: a file system of that size. Needs root."""
    mounted = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"disk{size}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs root, to mount a small file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("workers", [1, 4])
def test_case_89_a_full_disk(
    tmp_path: Path, run_pack: Run, small_disk: Any, container: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = link_many(tmp_path / "s", [noise(50_000, seed) for seed in range(3)], 60)
    options = ["--format", container, "--check", "none", "--shard-size", 1_005_000, "--workers", workers]
    # The check of free space says so before it begins ...
    disk = small_disk(2 << 20)
    done = run_pack(source, disk / "o", *options)
    assert done.returncode == 1
    assert "needs about" in done.stderr
    # ... and where the disk fills up meanwhile, the writing does.
    disk = small_disk(4 << 20)
    filler = disk / "filler"
    code = (
        "import sys; from packer import run, cli; "
        f"run._Run._check_space = lambda self, plan: open({str(filler)!r}, 'wb').write(bytes({(3 << 20) - 100_000})); "
        "cli.main()"
    )
    command = [sys.executable, "-c", code, str(source), str(disk / "o"), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert_no_room(done, disk / "o")
    filler.unlink()
    done = run_pack(source, disk / "o", *options)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("workers", [1, 4, 16])
def test_case_90_very_small_inputs(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, plain_records: Any, container: str, workers: int
) -> None:
    for images in (1, 3):
        source = make_tree(tmp_path / f"s{images}", good_files(draw_image, images))
        packed(source, tmp_path / f"o{images}", format=container, workers=workers)
        assert [record.image for record in plain_records(tmp_path / f"o{images}")] == [
            draw_image(number) for number in range(images)
        ]


def test_case_90_more_workers_than_images_in_a_pool(tmp_path: Path, image_tree: Tree, plain_records: Any) -> None:
    source = image_tree(tmp_path / "s", classes=1, per_class=3)
    packed(source, tmp_path / "o", workers=16, shard_records=1)
    assert len(plain_records(tmp_path / "o")) == 3


@pytest.mark.parametrize("files", [{}, {"c": None}, {"c/notes.txt": b"x"}, {".hidden/1.jpg": b"x"}])
@pytest.mark.parametrize("there", [False, True])
def test_case_90_no_images_is_an_error_and_writes_nothing(
    tmp_path: Path, make_tree: Tree, files: dict[str, bytes | None], there: bool
) -> None:
    source, out = make_tree(tmp_path / "s", files), tmp_path / "o"
    if there:
        out.mkdir()
    for workers in (1, 4):
        with pytest.raises(PackError, match="no images found in ") as caught:
            packed(source, out, workers=workers)
        assert caught.value.exit_status in (1, 2)
        assert out.exists() == there
        assert not there or list(out.iterdir()) == []


def test_case_90_no_images_makes_no_folders_on_the_way(tmp_path: Path, make_tree: Tree) -> None:
    with pytest.raises(PackError, match="Nothing was written"):
        packed(make_tree(tmp_path / "s", {}), tmp_path / "a/b/o")
    assert not (tmp_path / "a").exists()


def test_case_90_sources_that_are_no_folders(tmp_path: Path, draw_image: Draw) -> None:
    (tmp_path / "x.jpg").write_bytes(draw_image(1))
    for source in ("x.jpg", "nowhere", "x.jpg/below"):
        with pytest.raises(PackUsageError):
            packed(tmp_path / source, tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
@pytest.mark.parametrize("container", CONTAINERS)
def test_case_92_memory_does_not_grow_with_the_set(tmp_path: Path, container: str) -> None:
    data = [noise(500_000, seed) for seed in range(4)]
    small = link_many(tmp_path / "small", data, 100)
    large = link_many(tmp_path / "large", data, 800)
    base = peak_kib(PACK_CODE, small, tmp_path / "o1", container, "none")
    peak = peak_kib(PACK_CODE, large, tmp_path / "o2", container, "none")
    assert peak < base + 30 * 1024, "400 MB took more memory than 50 MB"
    assert peak < 150 * 1024 + 500


def test_case_92_memory_with_threads_is_bounded_too(tmp_path: Path) -> None:
    code = PACK_CODE.replace("workers=1", "workers=8")
    source = link_many(tmp_path / "s", [noise(1_000_000, seed) for seed in range(4)], 150)
    assert peak_kib(code, source, tmp_path / "o", "hdf5", "none") < 150 * 1024


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_94_files_that_change_while_packing(
    tmp_path: Path, image_tree: Tree, monkeypatch: pytest.MonkeyPatch, plain_records: Any, container: str
) -> None:
    from packer import run

    source = image_tree(tmp_path / "s", per_class=20)
    run_shards = run.run_shards

    def meanwhile(*words: Any, **named: Any) -> None:
        (source / "c0/0007.jpg").unlink()
        with open(source / "c1/0005.jpg", "ab") as file:
            file.write(b"more")
        (source / "c1/late.jpg").write_bytes(b"came too late")
        run_shards(*words, **named)

    monkeypatch.setattr(run, "run_shards", meanwhile)
    report = packed(source, tmp_path / "o", format=container, shard_size=5000, workers=2)
    assert (report.packed, report.rejected) == (38, 2)
    assert rejects(tmp_path / "o") == {"c0/0007.jpg": "missing", "c1/0005.jpg": "changed"}
    assert all(record.image == (source / record.key.decode()).read_bytes() for record in plain_records(tmp_path / "o"))
    assert verify(tmp_path / "o").ok


SIX_KINDS = {
    "empty": lambda good: b"",
    "not-an-image": lambda good: b"<html>",
    "unsupported": lambda good: good[:3],
    "truncated": lambda good: good[:-50],
    "damaged": lambda good: b"GIF89a\x04\x00\x04\x00\x80\x00\x00" + bytes(6) + b"\x21\xf9\x04\x00,",
    "too-many-pixels": lambda good: white_png(20_000, 20_000),
}


@pytest.fixture
def two_percent_bad(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> Path:
    """300 files, six of them bad, each in its own way, at random places."""
    files = {f"c{n % 3}/{n:03d}.png": draw_image(n % 20) for n in range(300)}
    for kind, place in zip(SIX_KINDS.values(), random.Random(1).sample(sorted(files), 6), strict=True):
        files[place] = kind(files[place])
    return make_tree(tmp_path / "s", files)


@pytest.mark.parametrize("container", QUICK)
def test_case_95_bad_files_do_not_end_a_run_and_sums_add_up(
    tmp_path: Path, two_percent_bad: Path, run_pack: Run, container: str
) -> None:
    (two_percent_bad / "c0" / "notes.txt").write_bytes(b"")
    (two_percent_bad / "c0" / ".hidden").write_bytes(b"")
    done = run_pack(
        two_percent_bad, tmp_path / "o", "--format", container, "--max-rejects", "2%", "--workers", 2, "--json",
        "--shard-records", 40,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["found"], result["packed"], result["rejected"]) == (300, 294, 6)
    assert result["listed"] == result["packed"] + result["rejected"] + result["skipped"] + sum(
        result["ignored"].values()
    )
    assert result["listed"] == sum(path.is_file() for path in two_percent_bad.rglob("*"))
    assert sum(result["reasons"].values()) == 6
    lines = [json.loads(line) for line in (tmp_path / "o/rejects.jsonl").read_text().splitlines()]
    assert all(set(line) == {"key", "stage", "reason", "detail"} for line in lines)
    assert {line["reason"] for line in lines} >= set(SIX_KINDS) - {"damaged"}


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_case_95_past_the_bound_the_run_fails(
    tmp_path: Path, two_percent_bad: Path, run_pack: Run, workers: int
) -> None:
    options = ["--workers", workers, "--shard-records", 40]
    done = run_pack(two_percent_bad, tmp_path / "o", *options, "--max-rejects", "1%")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "more than the 3 that --max-rejects allows" in done.stderr
    assert not (tmp_path / "o/manifest.json").exists()
    assert len(rejects(tmp_path / "o")) > 3


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(("workers", "shuffle"), [(1, None), (1, 5), (3, None)])
def test_case_96_labels_stay_with_their_images(
    tmp_path: Path, make_tree: Tree, container: str, workers: int, shuffle: int | None
) -> None:
    def picture(label: int) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (16, 16), (40 * label + 20, 10, 10)).save(file, "PNG")
        return file.getvalue()

    files = {f"class{label}/{n:02d}.png": picture(label) for label in range(5) for n in range(12)}
    for name in random.Random(2).sample(sorted(files), 15):
        files[name] = files[name][:40]
    source = make_tree(tmp_path / "s", files)
    report = packed(source, tmp_path / "o", format=container, workers=workers, shard_records=7, shuffle=shuffle)
    assert (report.packed, report.rejected) == (45, 15)
    dataset = ShardDataset(tmp_path / "o")
    assert [image.getpixel((8, 8))[0] for image, _ in dataset] == [40 * label + 20 for _, label in dataset]
    assert [f"class{label}" for _, label in dataset.samples] == [key.split("/")[0] for key, _ in dataset.samples]
    assert list(dataset.targets) == [label for _, label in dataset]


@pytest.mark.parametrize("images", [2000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_case_97_the_log_of_a_batch_job_stays_short(tmp_path: Path, run_pack: Run, images: int) -> None:
    source = link_many(tmp_path / "s", [noise(200)], images)
    with open(tmp_path / "log", "w+") as log:
        done = run_pack(
            source, tmp_path / "o", "--check", "none", "--shard-records", 100, "--workers", 2,
            stdout=log, stderr=log,
        )  # fmt: skip
    text = (tmp_path / "log").read_bytes().decode()
    assert done.returncode == 0, text
    assert "\r" not in text
    assert "\x1b" not in text
    assert len(text.splitlines()) < 50
    assert f"found {images:,} = packed {images:,} + rejected 0" in text


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_99_a_missing_shard_is_named_at_once(tmp_path: Path, image_tree: Tree, container: str) -> None:
    source = image_tree(tmp_path / "s", per_class=5)
    packed(source, tmp_path / "o", format=container, shard_records=2)
    shard = next((tmp_path / "o/shards/0000").glob("0000002.*"))
    shard.rename(shard.with_name(f"0000009{shard.suffix}"))
    with pytest.raises(ShardNotFoundError, match="shard 2 of 5 is missing") as caught:
        ShardDataset(tmp_path / "o")
    assert str(shard) in str(caught.value)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("harm", ["missing", "short", "swapped"])
def test_case_99_packing_again_over_a_harmed_set_says_so(
    tmp_path: Path, image_tree: Tree, container: str, harm: str
) -> None:
    source = image_tree(tmp_path / "s", per_class=5)
    options: dict[str, Any] = {"format": container, "shard_records": 2}
    packed(source, tmp_path / "o", **options)
    shards = sorted((tmp_path / "o/shards/0000").iterdir())
    if harm == "missing":
        shards[2].unlink()
    elif harm == "short":
        os.truncate(shards[2], 2000)
    else:
        shards[2].rename(tmp_path / "x")
        shards[3].rename(shards[2])
        (tmp_path / "x").rename(shards[3])
    with pytest.raises(PackError, match="0000002") as caught:
        packed(source, tmp_path / "o", **options)
    assert caught.value.exit_status == 1
    assert "\n" not in str(caught.value)
    packed(source, tmp_path / "o", overwrite=True, **options)
    assert verify(tmp_path / "o").ok


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_13_a_short_shard_is_named_at_once(tmp_path: Path, image_tree: Tree, container: str) -> None:
    packed(image_tree(tmp_path / "s", per_class=5), tmp_path / "o", format=container, shard_records=2)
    shard = next((tmp_path / "o/shards/0000").glob("0000004.*"))
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(ShardCorruptError) as caught:
        ShardDataset(tmp_path / "o")
    assert str(shard) in str(caught.value)


@pytest.mark.parametrize("container", CONTAINERS)
def test_case_100_a_set_can_be_moved(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = good_files(draw_image, 8) | {"c/bad.jpg": b""}
    source = make_tree(tmp_path / "source here", files)
    packed(source, tmp_path / "out there", format=container, shard_records=3)
    for path in (tmp_path / "out there").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert os.fsencode(tmp_path) not in data
            assert b"source here" not in data
            assert b"out there" not in data
    shutil.rmtree(source)
    (tmp_path / "out there").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    dataset = ShardDataset("moved", decode="bytes")
    monkeypatch.chdir("/")
    assert {dataset.key(i): sample.image for i, sample in enumerate(dataset)} == good_files(draw_image, 8)
