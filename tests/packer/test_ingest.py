"""`packer/ingest.py`: every reason to reject, what the columns say, and that nothing of Pillow leaks out."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image, ImageFile, UnidentifiedImageError

from packer import PackError, PackOptions, PackReport, TooManyRejectsError, pack
from packer import run as run_module
from packer.ingest import Ingest
from packer.items import REASONS, Record, Reject, SourceImage
from readers.layout import FLAGS, FORMAT_NAMES, MODE_NAMES

Draw = Callable[..., bytes]
Tree = Callable[..., Path]


def pack_here(source: Path, out: Path, **options: Any) -> PackReport:
    """Pack in this process, whatever is rejected."""
    return pack(source, out, PackOptions(**{"workers": 1, "max_rejects": "100%", **options}))


def rejects(out: Path) -> dict[str, dict[str, str]]:
    """Lines of ``rejects.jsonl`` by key."""
    path = out / "rejects.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else iter(())
    return {line["key"]: line for line in lines}


def index_of(out: Path) -> dict[str, Any]:
    """Index rows by key, of a set with one HDF5 shard."""
    with h5py.File(out / "shards/0000/0000000.h5") as file:
        data, rows = file["data"][:].tobytes(), file["index"][:]
    starts = [(int(row["key_offset"]), int(row["key_length"])) for row in rows]
    return {os.fsdecode(data[at : at + length]): row for (at, length), row in zip(starts, rows, strict=True)}


def flags_of(row: Any) -> set[str]:
    """Names of the flags of an index row."""
    return {name for name, bit in FLAGS.items() if row["flags"] & bit}


def png_header(width: int, height: int, data: bytes = b"", depth: int = 1) -> bytes:
    """A gray PNG of a few bytes; ``data`` are its raw rows."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(data, 1)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body


def while_packing(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Change the source after the scan, before anything is read."""
    run_shards = run_module.run_shards

    def changed(*arguments: Any, **named: Any) -> None:
        change()
        run_shards(*arguments, **named)

    monkeypatch.setattr(run_module, "run_shards", changed)


# -- reasons


def test_every_reason_that_content_gives(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    jpeg, png = draw_image(1, (64, 48)), draw_image(2, (64, 48), format="PNG")
    bad = {
        "empty.jpg": (b"", "empty", "identify"),
        "html.jpg": (b"<html>404</html>", "not-an-image", "identify"),
        "zeros.jpg": (bytes(1000), "not-an-image", "identify"),
        "one-byte.png": (b"\x89", "not-an-image", "identify"),
        "magic.jpg": (b"\xff\xd8\xff", "unsupported", "identify"),
        "text.bmp": (b"BM is no picture", "unsupported", "identify"),
        "half.jpg": (jpeg[: len(jpeg) // 2], "truncated", "check"),
        "half.png": (png[: len(png) // 2], "truncated", "check"),
        "no-end.jpg": (jpeg[:-2], "truncated", "check"),
        "broken.png": (png[:60] + bytes([png[60] ^ 0xFF]) + png[61:], "damaged", "check"),
        "bomb.png": (png_header(20_000, 20_000), "too-many-pixels", "check"),
    }
    root = make_tree(tmp_path / "s", {f"c/{name}": data for name, (data, _, _) in bad.items()} | {"c/good.jpg": jpeg})
    report = pack_here(root, tmp_path / "o")
    found = {key.removeprefix("c/"): (line["reason"], line["stage"]) for key, line in rejects(tmp_path / "o").items()}
    assert found == {name: (reason, stage) for name, (_, reason, stage) in bad.items()}
    assert all(line["detail"] for line in rejects(tmp_path / "o").values())
    assert (report.packed, report.rejected) == (1, len(bad))


def test_every_reason_that_the_file_system_gives(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["gone", "longer", "shorter", "emptied", "denied", "forbidden", "looped", "pipe", "folder", "good"]
    root = make_tree(tmp_path / "s", {f"c/{name}.jpg": draw_image(n) for n, name in enumerate(names)})
    path = {name: root / "c" / f"{name}.jpg" for name in names}
    denied = {str(path["denied"]): errno.EACCES, str(path["forbidden"]): errno.EPERM}
    real_open = os.open

    def guarded(name: Any, *rest: Any, **named: Any) -> int:
        code = denied.get(os.fsdecode(name))
        if code is not None:
            raise OSError(code, os.strerror(code), name)
        return real_open(name, *rest, **named)

    def change() -> None:
        path["gone"].unlink()
        path["longer"].write_bytes(path["longer"].read_bytes() + b"x")
        path["shorter"].write_bytes(path["shorter"].read_bytes()[:-1])
        path["emptied"].write_bytes(b"")
        for name in ("looped", "pipe", "folder"):
            path[name].unlink()
        path["looped"].symlink_to("looped.jpg")
        os.mkfifo(path["pipe"])
        path["folder"].mkdir()
        monkeypatch.setattr(os, "open", guarded)

    while_packing(monkeypatch, change)
    report = pack_here(root, tmp_path / "o")
    reasons = {key[2:-4]: line["reason"] for key, line in rejects(tmp_path / "o").items()}
    assert reasons == {
        "gone": "missing", "longer": "changed", "shorter": "changed", "emptied": "changed", "denied": "permission",
        "forbidden": "permission", "looped": "unreadable", "pipe": "not-a-file", "folder": "not-a-file",
    }  # fmt: skip
    assert report.packed == 1


def test_a_file_of_more_than_4_gib_is_rejected_unread(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    root = make_tree(tmp_path / "s", {"c/a.jpg": draw_image(1), "c/b.jpg": draw_image(2)})
    try:
        os.truncate(root / "c/a.jpg", 2**32)  # sparse: takes no room
    except OSError:
        pytest.skip("this file system holds no file of 4 GiB")
    report = pack_here(root, tmp_path / "o", shard_records=10)
    assert report.reasons == {"too-large": 1}
    assert report.packed == 1


def test_all_reasons_are_tested_here() -> None:
    tested = Path(__file__).read_text()
    assert [reason for reason in REASONS if f'"{reason}"' not in tested] == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("workers", [1, 3])
def test_trouble_of_the_machine_ends_the_run(
    tmp_path: Path, image_tree: Tree, monkeypatch: pytest.MonkeyPatch, code: int, workers: int
) -> None:
    root = image_tree(tmp_path / "s")
    real_read = os.read

    def failing(fd: int, length: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("c1/0001.jpg"):
            raise OSError(code, os.strerror(code))
        return real_read(fd, length)

    monkeypatch.setattr(os, "read", failing)
    with pytest.raises(PackError, match=r"c1/0001.jpg' failed: .* not the file") as caught:
        pack_here(root, tmp_path / "o", workers=workers)
    assert not isinstance(caught.value, TooManyRejectsError)
    assert not (tmp_path / "o/manifest.json").exists()
    monkeypatch.undo()
    assert pack_here(root, tmp_path / "o", workers=workers).packed == 6


def test_short_reads_are_finished(tmp_path: Path, image_tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    root = image_tree(tmp_path / "s")
    real_read = os.read
    monkeypatch.setattr(os, "read", lambda fd, length: real_read(fd, min(length, 100)))
    assert pack_here(root, tmp_path / "o").packed == 6


# -- what Pillow raises


def upright() -> bytes:
    """An EXIF block, without which Pillow is not asked for metadata."""
    exif = Image.Exif()
    exif[0x0112] = 1
    return exif.tobytes()


EXCEPTIONS = [
    OSError("image file is truncated (7 bytes not processed)"), OSError(errno.EIO, "I/O"), ValueError("x"),
    SyntaxError("broken PNG file"), IndexError("x"), KeyError("x"), TypeError("x"), AttributeError("x"), EOFError(),
    struct.error("x"), zlib.error("x"), ZeroDivisionError(), OverflowError("x"), RuntimeError("x"), AssertionError(),
    NotImplementedError("x"), RecursionError("x"), StopIteration(), UnicodeDecodeError("ascii", b"\xff", 0, 1, "x"),
    UnidentifiedImageError("x"), Image.DecompressionBombError("Image size (1 pixels) exceeds limit, could be"),
    Image.DecompressionBombWarning("x"), UserWarning("x"), TimeoutError("x"), FileNotFoundError(2, "x"),
    UnicodeEncodeError("ascii", "\ud800", 0, 1, "x"), Exception("two\nlines"), Exception(b"bytes"),
]  # fmt: skip


def raise_from_pillow(
    monkeypatch: pytest.MonkeyPatch, stage: str, errors: Sequence[BaseException], marker: bytes = b"marker%02d"
) -> None:
    """Make Pillow raise at a stage, an error for each file that holds the marker with its number."""
    real_open = Image.open

    def opened(file: Any, *rest: Any, **named: Any) -> Any:
        image = real_open(file, *rest, **named)
        for number, error in enumerate(errors):
            if marker % number in file.getvalue():
                if stage == "open":
                    raise error
                monkeypatch.setattr(image, stage, partial(throw, error), raising=False)
        return image

    monkeypatch.setattr(Image, "open", opened)


def throw(error: BaseException, *_: Any, **__: Any) -> None:
    """Raise it, whatever the arguments."""
    raise error


@pytest.fixture
def marked(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> Path:
    """A file for each of `EXCEPTIONS`, and one that is good."""
    images = [draw_image(number, exif=upright()) for number in range(len(EXCEPTIONS))]
    files = {f"c/{number:02d}.jpg": image + b"marker%02d" % number for number, image in enumerate(images)}
    return make_tree(tmp_path / "s", files | {"c/good.jpg": draw_image(99)})


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("stage", ["open", "load"])
def test_whatever_pillow_raises_rejects_that_file_alone(
    tmp_path: Path, marked: Path, monkeypatch: pytest.MonkeyPatch, stage: str, workers: int
) -> None:
    raise_from_pillow(monkeypatch, stage, EXCEPTIONS)
    report = pack_here(marked, tmp_path / "o", workers=workers)
    found = rejects(tmp_path / "o")
    wrong = [type(error).__name__ for n, error in enumerate(EXCEPTIONS) if f"c/{n:02d}.jpg" not in found]
    assert wrong == [], "these were swallowed"
    assert (report.packed, report.rejected) == (1, len(EXCEPTIONS))
    assert {line["reason"] for line in found.values()} <= set(REASONS)
    assert found["c/00.jpg"]["reason"] == "truncated"


def test_whatever_broken_metadata_raise_keeps_the_picture(
    tmp_path: Path, marked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_from_pillow(monkeypatch, "getexif", EXCEPTIONS)
    report = pack_here(marked, tmp_path / "o")
    assert rejects(tmp_path / "o") == {}
    assert (report.packed, report.flags) == (len(EXCEPTIONS) + 1, {"bad-metadata": len(EXCEPTIONS)})


@pytest.mark.parametrize("stage", ["open", "load", "getexif"])
@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("workers", [1, 3])
def test_memory_errors_and_interrupts_end_the_run(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, monkeypatch: pytest.MonkeyPatch,
    stage: str, error: BaseException, workers: int,
) -> None:  # fmt: skip
    root = make_tree(tmp_path / "s", {"c/a.jpg": draw_image(1), "c/b.jpg": draw_image(2, exif=upright()) + b"marker00"})
    raise_from_pillow(monkeypatch, stage, [error])
    filters = list(warnings.filters)
    with pytest.raises(type(error)):
        pack_here(root, tmp_path / "o", workers=workers)
    assert warnings.filters == filters
    assert not (tmp_path / "o/manifest.json").exists()
    assert [path for path in (tmp_path / "o").rglob("*") if path.name.startswith("tmp-")] == []


# -- the check


@pytest.fixture(scope="module")
def mutants(draw_image: Draw) -> dict[str, bytes]:
    """JPEGs of many kinds, each damaged in its own way, and some left whole."""
    random = np.random.default_rng(7)
    found = {}
    for number in range(360):
        data = bytearray(
            draw_image(
                number % 40,
                (33 + number % 50, 48),
                ("RGB", "L", "CMYK", "RGB")[number % 4],
                quality=(30, 75, 95)[number % 3],
                progressive=number % 5 == 0,
                restart_marker_rows=number % 7 == 0,
            )
        )
        at = int(random.integers(2, len(data)))
        match number % 6:
            case 0:
                del data[at:]
            case 1:
                for place in random.integers(2, len(data), 1 + number % 9):
                    data[place] = random.integers(0, 256)
            case 2:
                del data[at : at + 1 + number % 30]
            case 3:
                data[at:] = bytes(len(data) - at)
            case 4:
                data[at:at] = random.bytes(1 + number % 40)
        found[f"c/{number:03d}.jpg"] = bytes(data)
    return found


def fully_decoded(data: bytes, format: str = "JPEG") -> bool:
    """Does Pillow decode the file, at full size?"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Image.open(io.BytesIO(data), formats=(format,)).load()
        except Exception:  # noqa: BLE001  whatever it is
            return False
    return True


def test_the_check_rejects_exactly_what_a_full_decode_rejects(
    tmp_path: Path, make_tree: Tree, mutants: dict[str, bytes]
) -> None:
    pack_here(make_tree(tmp_path / "s", mutants), tmp_path / "o")
    bad = {name for name, data in mutants.items() if not fully_decoded(data)}
    assert 60 < len(bad) < 300
    assert set(rejects(tmp_path / "o")) == bad


@pytest.mark.parametrize("format", ["PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "AVIF", "JPEG2000"])
def test_other_formats_are_rejected_exactly_where_pillow_fails(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, format: str
) -> None:
    random = np.random.default_rng(3)
    files = {}
    for number in range(40):
        data = bytearray(draw_image(number, (40, 30), format=format))
        at = int(random.integers(16, len(data)))
        match number % 4:
            case 0:
                del data[at:]
            case 1:
                data[at] ^= 1 << (number % 8)
            case 2:
                for place in random.integers(16, len(data), 12):
                    data[place] = random.integers(0, 256)
        files[f"c/{number:02d}.png"] = bytes(data)
    pack_here(make_tree(tmp_path / "s", files), tmp_path / "o")
    assert set(rejects(tmp_path / "o")) == {name for name, data in files.items() if not fully_decoded(data, format)}
    assert not {f"c/{number:02d}.png" for number in range(3, 40, 4)} & set(rejects(tmp_path / "o"))


def test_check_header_opens_and_check_none_looks_at_the_first_bytes(
    tmp_path: Path, make_tree: Tree, draw_image: Draw
) -> None:
    jpeg = draw_image(1, (64, 48))
    files = {"c/good.jpg": jpeg, "c/half.jpg": jpeg[:-100], "c/head.jpg": jpeg[:20], "c/text.jpg": b"hello"}
    root = make_tree(tmp_path / "s", files)
    pack_here(root, tmp_path / "header", check="header")
    pack_here(root, tmp_path / "none", check="none")
    assert set(rejects(tmp_path / "header")) == {"c/head.jpg", "c/text.jpg"}
    assert set(rejects(tmp_path / "none")) == {"c/text.jpg"}
    header, none = index_of(tmp_path / "header"), index_of(tmp_path / "none")
    assert [header["c/half.jpg"][name] for name in ("width", "height", "format", "mode")] == [64, 48, 1, 7]
    for row in none.values():
        assert not any(row[name] for name in ("width", "height", "format", "mode", "orientation", "flags"))


def test_check_header_does_not_decode_pngs(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    png = draw_image(2, (64, 48), format="PNG")
    root = make_tree(tmp_path / "s", {"c/half.png": png[:200], "c/broken.png": png[:60] + b"?" + png[61:]})
    # Pillow loads the picture when asked for the EXIF of a PNG that has none: damage there is not in the metadata.
    assert pack_here(root, tmp_path / "o", check="header").flags == {}


def test_max_pixels_cuts_exactly(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    root = make_tree(tmp_path / "s", {f"c/{n}.png": draw_image(n, (n, 10), format="PNG") for n in (9, 10, 11, 25)})
    pack_here(root, tmp_path / "o", max_pixels=100)
    assert set(rejects(tmp_path / "o")) == {"c/11.png", "c/25.png"}
    assert {line["reason"] for line in rejects(tmp_path / "o").values()} == {"too-many-pixels"}


def test_case_65_max_pixels_also_raises_the_limit(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    scan = png_header(14_000, 14_000, bytes(14_000 * 1751))
    root = make_tree(tmp_path / "s", {"c/big.png": scan} | {f"c/{n}.jpg": draw_image(n) for n in range(10)})
    default = pack_here(root, tmp_path / "default", check="header")
    assert (default.packed, default.reasons) == (10, {"too-many-pixels": 1})
    raised = pack_here(root, tmp_path / "raised", check="header", max_pixels=200_000_000)
    assert (raised.packed, raised.flags) == (11, {"large": 1})
    assert any("more than 89,478,485 pixels" in warning for warning in raised.warnings)


# -- the columns


def test_width_and_height_are_the_files_own(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    formats = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000", "MPO")
    root = make_tree(tmp_path / "s", {f"c/{name}.jpg": draw_image(3, (123, 45), format=name) for name in formats})
    pack_here(root, tmp_path / "o")
    index = index_of(tmp_path / "o")
    assert {key: (int(row["width"]), int(row["height"])) for key, row in index.items()} == {
        f"c/{name}.jpg": (123, 45) for name in formats
    }
    assert {key: FORMAT_NAMES[row["format"]] for key, row in index.items()} == {
        # One picture alone makes no multi-picture file.
        f"c/{name}.jpg": "JPEG" if name == "MPO" else name
        for name in formats
    }


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_mode_of_pngs(tmp_path: Path, make_tree: Tree, draw_image: Draw, mode: str) -> None:
    root = make_tree(tmp_path / "s", {"c/x.png": draw_image(1, (20, 30), mode, "PNG")})
    pack_here(root, tmp_path / "o")
    (row,) = index_of(tmp_path / "o").values()
    assert MODE_NAMES[row["mode"]] == mode
    assert flags_of(row) == ({"alpha"} if mode.endswith("A") else {"16-bit"} if "16" in mode else set())


def test_16_bit_flag_is_not_set_by_a_row_stride(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    # 56 pixels of 3 bytes: a stride of 168, which once read as "16 bits".
    files = {f"c/{n}.bmp": draw_image(n, (width, 8), format="BMP") for n, width in enumerate((5, 16, 53, 54, 56, 160))}
    files |= {"c/p.gif": draw_image(1, (160, 16), "P", "GIF"), "c/t.tif": draw_image(1, (56, 16), "RGB", "TIFF")}
    report = pack_here(make_tree(tmp_path / "s", files), tmp_path / "o")
    assert report.flags == {}
    assert report.warnings == [
        "sample indices differ from ImageFolder's on this source: files it would not take (.gif 1)"
    ]


def test_16_bit_flag_of_deep_files(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    files = {
        "c/gray.pgm": b"P5\n4 4\n65535\n" + bytes(32),
        "c/gray.png": draw_image(1, mode="I;16", format="PNG"),
        "c/gray.tif": draw_image(1, mode="I;16", format="TIFF"),
        "c/float.tif": draw_image(1, mode="F", format="TIFF"),
        "c/rgb.png": png_rgb16(),
    }
    report = pack_here(make_tree(tmp_path / "s", files), tmp_path / "o")
    assert report.flags == {"16-bit": len(files)}


def test_16_bit_flag_of_colour_ppm(tmp_path: Path, make_tree: Tree) -> None:
    root = make_tree(
        tmp_path / "s", {"c/a.ppm": b"P6\n4 4\n65535\n" + bytes(96), "c/b.ppm": b"P6\n4 4\n255\n" + bytes(48)}
    )
    assert pack_here(root, tmp_path / "o").flags == {"16-bit": 1}


def png_rgb16() -> bytes:
    """A 16-bit RGB PNG, which Pillow opens as 8-bit RGB."""
    data = png_header(4, 4, bytes(4 * 25), depth=16)
    header = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    return data[:16] + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + data[33:]


def test_columns_of_the_hard_files(tmp_path: Path, shared_data: Path) -> None:
    pack_here(shared_data / "hard", tmp_path / "o", all_files=True)
    index = index_of(tmp_path / "o")
    with open(shared_data / "hard.csv", newline="") as file:
        known = {row["file"]: row for row in csv.DictReader(file) if row["pillow_13_0"] == "ok"}
    assert set(index) == set(known)
    for name, row in index.items():
        want = known[name]
        assert (FORMAT_NAMES[row["format"]], MODE_NAMES[row["mode"]], str(row["width"]), str(row["height"])) == (
            want["format"], want["mode"], want["width"], want["height"],
        ), name  # fmt: skip
        assert int(row["orientation"]) == int(want["orientation"] or 0), name
        assert ("animated" in flags_of(row)) == (int(want["frames"]) > 1), name
        assert ("cmyk" in flags_of(row)) == (want["mode"] == "CMYK"), name
        assert ("16-bit" in flags_of(row)) == ("16bit" in name or want["mode"] in ("I", "F", "I;16")), name
        assert ("alpha" in flags_of(row)) == (want["mode"] in ("LA", "RGBA") or "transparency" in name)
        assert "large" not in flags_of(row)


@pytest.mark.parametrize("value", [*range(1, 9), 0, 9, 99, 65535])
def test_orientation_values(tmp_path: Path, make_tree: Tree, draw_image: Draw, value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    root = make_tree(tmp_path / "s", {"c/x.jpg": draw_image(1, exif=exif.tobytes())})
    report = pack_here(root, tmp_path / "o")
    (row,) = index_of(tmp_path / "o").values()
    assert row["orientation"] == (value if 1 <= value <= 8 else 0)
    assert report.orientations == ({str(value): 1} if 2 <= value <= 8 else {})
    assert flags_of(row) == set()


# -- Pillow's globals


@pytest.fixture
def untouched() -> Iterator[None]:
    """Pillow's and Python's globals are afterwards what they were."""
    before = pillow_globals()
    yield
    assert pillow_globals() == before


def pillow_globals() -> tuple[Any, ...]:
    """What decoding may be tempted to change."""
    return (
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, ImageFile.MAXBLOCK, list(warnings.filters),
        warnings.showwarning,
    )  # fmt: skip


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("max_pixels", [None, 50, 10**9])
def test_globals_are_as_they_were(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, workers: int, max_pixels: int | None
) -> None:
    files = {f"c/{n}.jpg": draw_image(n) for n in range(8)}
    files |= {"c/bad.jpg": draw_image(1)[:-9], "c/exif.jpg": broken_exif(draw_image(1))}
    pack_here(make_tree(tmp_path / "s", files), tmp_path / "o", workers=workers, max_pixels=max_pixels)


def broken_exif(jpeg: bytes) -> bytes:
    """The picture with an EXIF block that makes Pillow warn."""
    block = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(range(12)) * 3
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + jpeg[2:]


@pytest.mark.usefixtures("untouched")
def test_warnings_of_pillow_are_counted_and_of_others_passed_on(
    tmp_path: Path, make_tree: Tree, draw_image: Draw
) -> None:
    files = {"c/a.jpg": draw_image(1), "c/b.jpg": broken_exif(draw_image(1))}
    # Warnings are errors in this test run, as they may be in the caller's program.
    report = pack_here(make_tree(tmp_path / "s", files), tmp_path / "o")
    assert report.flags == {"bad-metadata": 1}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_warning_that_was_shown_before_is_counted_all_the_same(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, workers: int
) -> None:
    bad = broken_exif(draw_image(1))
    root = make_tree(tmp_path / "s", {"c/a.jpg": bad, "c/b.jpg": bad, "c/c.jpg": bad})
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        Image.open(io.BytesIO(bad)).getexif()
        assert shown
        # Python remembers what it has shown "by default", and would keep quiet about it now.
        assert pack_here(root, tmp_path / "o", workers=workers).flags == {"bad-metadata": 3}


@pytest.mark.parametrize("workers", [1, 4])
def test_load_truncated_images_of_the_caller_does_not_let_damage_in(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    files = {f"c/{n}.jpg": draw_image(n) for n in range(4)}
    files |= {"c/half.jpg": draw_image(9, (64, 48))[:-200], "c/half.png": draw_image(9, (64, 48), format="PNG")[:-200]}
    root = make_tree(tmp_path / "s", files)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    report = pack_here(root, tmp_path / "o", workers=workers)
    assert report.reasons == {"truncated": 2}
    assert ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.parametrize("limit", [None, 10])
def test_the_callers_pixel_limit_does_not_change_the_set(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    root = make_tree(tmp_path / "s", {"c/a.jpg": draw_image(1), "c/bomb.png": png_header(20_000, 20_000)})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    # The manifest says "Pillow's limit"; a worker process would have the one that Pillow ships with.
    assert pack_here(root, tmp_path / "o", check="header").reasons == {"too-many-pixels": 1}
    assert limit == Image.MAX_IMAGE_PIXELS


# -- threads


def test_threads_keep_the_order_and_bound_what_flies(tmp_path: Path, image_tree: Tree) -> None:
    root = image_tree(tmp_path, classes=1, per_class=60)
    names = sorted(path.name for path in (root / "c0").iterdir())
    asked = 0

    def images() -> Iterator[SourceImage]:
        nonlocal asked
        for name in names:
            asked += 1
            yield SourceImage(b"c0/" + name.encode(), 0, (root / "c0" / name).stat().st_size, 0)

    ahead = 0
    done = []
    for item in Ingest(str(root), "decode", None).each(images(), threads=3):
        done.append(item.key.decode()[3:])
        ahead = max(ahead, asked - len(done))
    assert done == names
    assert ahead <= 13


def test_one_file_at_a_time_equals_many_threads(tmp_path: Path, make_tree: Tree, mutants: dict[str, bytes]) -> None:
    root = make_tree(tmp_path, dict(list(mutants.items())[:80]))
    images = [SourceImage(name.encode(), 0, len(data), 0) for name, data in list(mutants.items())[:80]]
    ingest = Ingest(str(root), "decode", None)
    alone = list(ingest.each(images))
    together = list(ingest.each(images, threads=4))
    assert together == alone
    assert {Record, Reject} == set(map(type, alone))


def test_an_error_in_a_thread_ends_the_threads(tmp_path: Path, image_tree: Tree) -> None:
    root = image_tree(tmp_path, classes=1, per_class=3)

    def images() -> Iterator[SourceImage]:
        yield SourceImage(b"c0/0000.jpg", 0, -1, -1)
        raise LookupError("the plan is gone")

    with pytest.raises(LookupError):
        list(Ingest(str(root), "decode", None).each(images(), threads=2))
