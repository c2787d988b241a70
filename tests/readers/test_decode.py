"""readers/decode.py and imaging.py: the pixels that Pillow gives, with the documented exceptions and in silence."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps
from torchvision.datasets.folder import pil_loader

from readers import RecordDecodeError, ShardDataset, decode, imaging
from readers.decode import make_decoder
from readers.imaging import quiet_pillow, sniff

WHITE = 255
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "MPO")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "I", "F", "I;16", "I;16B")


def pixels(image: Image.Image | torch.Tensor) -> np.ndarray[Any, Any]:
    return np.asarray(image)


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def picture(mode: str, size: tuple[int, int] = (13, 7)) -> Image.Image:
    """Every band another gradient, so that no two ways to convert agree by chance."""
    width, height = size
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    ramp = (x * 17 + y * 31) % 256
    if mode.startswith("I;16"):
        values = (x * 5000 + y * 301).astype(">u2" if mode == "I;16B" else "<u2")
        return Image.frombytes(mode, size, values.tobytes())
    if mode in ("I", "F"):
        return Image.fromarray((x * 40 + y * 3 - 20).astype({"I": np.int32, "F": np.float32}[mode]))
    bands = np.stack([ramp, 255 - ramp, (ramp * 7) % 256, (ramp * 3) % 256], 2).astype(np.uint8)
    if mode == "P":
        return Image.fromarray(bands[:, :, :3]).quantize(32)
    if mode == "PA":
        image = Image.new("PA", size)
        image.putpalette([(255 - v) for v in range(256) for _ in range(3)])
        image.putdata([(int(a), int(b)) for a, b in zip(bands[:, :, 0].flat, bands[:, :, 3].flat, strict=True)])
        return image
    if mode == "1":
        return Image.fromarray(bands[:, :, 0]).convert("1")
    count = len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(mode, size, np.ascontiguousarray(bands[:, :, 4 - count :]).tobytes())


def drawable() -> Iterator[Any]:
    """Every mode in every format that Pillow can write and read again."""
    for format in FORMATS:
        for mode in MODES:
            try:
                data = encode(picture(mode), format)
            except (OSError, ValueError, KeyError, NotImplementedError):
                continue
            yield pytest.param(data, id=f"{format}-{mode}")


DRAWABLE = list(drawable())
JPEG_OPTIONS = (
    {"quality": 30},
    {"quality": 95, "subsampling": 0},
    {"subsampling": 2},
    {"progressive": True},
    {"optimize": True},
    {"restart_marker_blocks": 1},
)
to_pil = make_decoder("pil")
to_tensor = make_decoder("tensor")


def by_pillow(data: bytes) -> np.ndarray[Any, Any]:
    return pixels(Image.open(io.BytesIO(data)).convert("RGB"))


def by_rule(image: Image.Image) -> np.ndarray[Any, Any]:
    """The two documented exceptions, said again with numpy."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG")):
        return np.repeat((pixels(image).astype(int) >> 8)[:, :, None], 3, 2)
    if not image.has_transparency_data:
        return pixels(image.convert("RGB"))
    rgba = pixels(image.convert("RGBA")).astype(float)
    alpha = rgba[:, :, 3:] / 255
    return np.round(rgba[:, :, :3] * alpha + WHITE * (1 - alpha))


def test_most_modes_can_be_drawn() -> None:
    assert len(DRAWABLE) > 60
    assert {param.id.split("-")[0] for param in DRAWABLE} == set(FORMATS)


@pytest.mark.parametrize("data", DRAWABLE)
def test_rgb_is_what_pillow_converts_to_and_the_exceptions_as_documented(data: bytes) -> None:
    image = Image.open(io.BytesIO(data))
    found = to_pil(data)
    assert (found.mode, found.size) == ("RGB", image.size)
    assert np.abs(pixels(found).astype(int) - by_rule(image)).max() <= (1 if image.has_transparency_data else 0)
    if not image.has_transparency_data and not image.mode.startswith("I"):
        assert (pixels(found) == by_pillow(data)).all()


@pytest.mark.parametrize("data", DRAWABLE)
def test_tensor_is_the_picture(data: bytes) -> None:
    tensor = to_tensor(data)
    assert tensor.dtype == torch.uint8
    assert tensor.is_contiguous()
    assert (tensor.permute(1, 2, 0).numpy() == pixels(to_pil(data))).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", JPEG_OPTIONS, ids=str)
def test_jpeg_of_any_kind_is_what_pillow_decodes(mode: str, options: dict[str, Any]) -> None:
    if mode == "L":
        options = {name: value for name, value in options.items() if name != "subsampling"}
    data = encode(picture(mode, (61, 47)), "JPEG", **options)
    assert (pixels(to_pil(data)) == by_pillow(data)).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "I;16"])
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_deflate", "packbits"])
def test_tiff_of_any_kind_is_what_pillow_decodes(mode: str, compression: str) -> None:
    data = encode(picture(mode), "TIFF", compression=compression)
    assert (pixels(to_pil(data)) == by_rule(Image.open(io.BytesIO(data)))).all()


def test_real_files_are_what_torchvision_loads(shared_data: Path) -> None:
    """Every odd file that torchvision can load; ours must not be able to load fewer."""
    loaded = 0
    for path in sorted((shared_data / "hard").iterdir()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = pixels(pil_loader(str(path)))
                image = Image.open(io.BytesIO(path.read_bytes()))
            except Exception:  # noqa: BLE001  whatever Pillow raises: torchvision cannot load it
                continue
        found = pixels(to_pil(path.read_bytes()))
        loaded += 1
        if image.has_transparency_data or image.mode.startswith("I"):
            assert found.shape == expected.shape, path
        else:
            assert (found == expected).all(), path
    assert loaded > 50


# -- transparency: over white, the same in every mode (case 61)


def hidden(mode: str, colour: int | tuple[int, ...]) -> dict[str, bytes]:
    """A transparent pixel over ``colour`` beside an opaque black one."""
    image = Image.new(mode, (2, 1))
    image.putpixel((0, 0), colour)
    image.putpixel((1, 0), 0 if mode == "L" else (0, 0, 0))
    gray = isinstance(colour, int)
    return {
        f"PNG {mode}+tRNS": encode(image, "PNG", transparency=colour),
        f"PNG {mode}A": encode(with_alpha(image), "PNG"),
        f"TIFF {mode}A": encode(with_alpha(image), "TIFF"),
        **({} if gray else {"WebP": encode(with_alpha(image), "WEBP", lossless=True, exact=True)}),
        **({} if gray else {"JPEG 2000": encode(with_alpha(image), "JPEG2000", irreversible=False)}),
    }


def with_alpha(image: Image.Image) -> Image.Image:
    alpha = Image.new("L", (2, 1), 255)
    alpha.putpixel((0, 0), 0)
    image = image.copy()
    image.putalpha(alpha)
    return image


def paletted() -> dict[str, bytes]:
    image = Image.new("P", (2, 1))
    image.putpalette([0, 200, 0, 0, 0, 0])
    image.putdata([0, 1])
    return {
        "PNG P+tRNS": encode(image, "PNG", transparency=0),
        "PNG P+tRNS table": encode(image, "PNG", transparency=bytes([0, 255])),
        "GIF": encode(image, "GIF", transparency=0),
    }


TRANSPARENT = {**hidden("RGB", (200, 0, 0)), **hidden("L", 128), **paletted()}


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_case_61_transparent_pixel_is_white_whatever_lies_under_it(kind: str) -> None:
    image = Image.open(io.BytesIO(TRANSPARENT[kind]))
    assert image.has_transparency_data
    assert pixels(to_pil(TRANSPARENT[kind])).tolist() == [[[255, 255, 255], [0, 0, 0]]]
    assert to_tensor(TRANSPARENT[kind])[:, 0, 0].tolist() == [255, 255, 255]


def test_case_61_same_sample_from_each_mode(container: str, tmp_path: Path, pack_files: Callable[..., Any]) -> None:
    files = {
        f"c/{number}.{'gif' if kind == 'GIF' else 'png'}": data
        for number, (kind, data) in enumerate(TRANSPARENT.items())
    }
    packed = pack_files(tmp_path, files, container)
    found = {sample.image.tobytes() for sample in ShardDataset(packed.root)}
    assert found == {bytes([255, 255, 255, 0, 0, 0])}


@pytest.mark.parametrize("alpha", [0, 1, 127, 128, 254, 255])
def test_half_transparent_is_mixed_with_white(alpha: int) -> None:
    expected = [round(value * alpha / 255 + 255 * (255 - alpha) / 255) for value in (10, 100, 250)]
    rgba = Image.new("RGBA", (1, 1), (10, 100, 250, alpha))
    assert pixels(to_pil(encode(rgba, "PNG")))[0, 0].tolist() == pytest.approx(expected, abs=1)
    gray = Image.new("LA", (1, 1), (10, alpha))
    assert pixels(to_pil(encode(gray, "PNG")))[0, 0].tolist() == pytest.approx([expected[0]] * 3, abs=1)


def png(depth: int, colour: int, row: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of two pixels that Pillow itself would not write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 2, 1, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def test_case_61_transparent_colour_of_16_bit_gray() -> None:
    data = png(16, 0, struct.pack(">HH", 1000, 40_000), (b"tRNS", struct.pack(">H", 1000)))
    assert pixels(to_pil(data))[0, :, 0].tolist() == [255, 40_000 >> 8]


def test_1_bit_gray_with_a_transparent_colour() -> None:
    data = png(1, 0, b"\x40", (b"tRNS", struct.pack(">H", 0)))
    assert pixels(to_pil(data))[0, :, 0].tolist() == [255, 255]


# -- 16 bits


@pytest.mark.parametrize(
    ("format", "mode"),
    [("PNG", "I;16"), ("TIFF", "I;16"), ("TIFF", "I;16B"), ("PPM", "I;16"), ("JPEG2000", "I;16")],
)
def test_16_bit_gray_is_scaled_not_clipped(format: str, mode: str) -> None:
    source = picture(mode)
    options = {"irreversible": False} if format == "JPEG2000" else {}
    found = pixels(to_pil(encode(source, format, **options)))
    expected = pixels(source).astype(int) >> 8
    assert expected.max() > 200
    assert len(np.unique(expected)) > 20
    for band in range(3):
        assert (found[:, :, band] == expected).all()


def test_16_bit_colour_is_what_pillow_makes_of_it() -> None:
    data = png(16, 2, struct.pack(">6H", 1000, 2000, 3000, 40_000, 50_000, 60_000))
    assert pixels(to_pil(data)).tolist() == by_pillow(data).tolist() == [[[3, 7, 11], [156, 195, 234]]]


def test_32_bit_integers_and_floats_are_clipped_as_by_pillow() -> None:
    for mode in ("I", "F"):
        data = encode(picture(mode), "TIFF")
        assert (pixels(to_pil(data)) == by_pillow(data)).all()


# -- orientation (case 62)


def asymmetric() -> Image.Image:
    image = Image.new("RGB", (16, 8), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 8, 4))
    image.paste((0, 255, 0), (8, 0, 16, 4))
    return image


def oriented(format: str, value: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    return encode(asymmetric(), format, exif=exif)


TURNED = {5, 6, 7, 8}


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "MPO", "AVIF"])
@pytest.mark.parametrize("value", [0, 1, 2, 3, 4, 5, 6, 7, 8, 99])
def test_case_62_orientation_on_and_off(format: str, value: int) -> None:
    data = oriented(format, value)
    on, off = make_decoder("pil", exif_transpose=True)(data), make_decoder("pil", exif_transpose=False)(data)
    assert (pixels(off) == by_pillow(data)).all()
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert on.size == upright.size == ((8, 16) if value in TURNED else (16, 8))
    assert (pixels(on) == pixels(upright)).all()
    tensor = make_decoder("tensor", exif_transpose=True)(data)
    assert (tensor.permute(1, 2, 0).numpy() == pixels(upright)).all()


def test_case_62_orientation_in_a_packed_set(container: str, tmp_path: Path, pack_files: Callable[..., Any]) -> None:
    files = {f"c/{value:02d}.jpg": oriented("JPEG", value) for value in [*range(9), 99]}
    packed = pack_files(tmp_path, files, container)
    plain, upright = ShardDataset(packed.root), ShardDataset(packed.root, exif_transpose=True)
    for index, data in enumerate(packed.images):
        assert plain[index].image.tobytes() == Image.open(io.BytesIO(data)).tobytes()
        assert upright[index].image.tobytes() == ImageOps.exif_transpose(Image.open(io.BytesIO(data))).tobytes()


def test_orientation_of_real_files(shared_data: Path) -> None:
    decoder = make_decoder("pil", exif_transpose=True)
    paths = [path for path in sorted((shared_data / "hard").iterdir()) if "orientation" in path.name]
    assert len(paths) >= 10
    for path in paths:
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(path.read_bytes()))).convert("RGB")
        assert decoder(path.read_bytes()).tobytes() == expected.tobytes(), path


def test_transparent_picture_is_turned_too() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = asymmetric().convert("RGBA")
    image.putpixel((0, 0), (9, 9, 9, 0))
    found = make_decoder("pil", exif_transpose=True)(encode(image, "PNG", exif=exif))
    assert found.size == (8, 16)
    assert found.getpixel((7, 0)) == (255, 255, 255)


# -- broken metadata (case 63)


def broken_exif() -> bytes:
    """A JPEG whose EXIF block announces more entries than it has: Pillow warns about it."""
    block = b"Exif\0\0II*\0\x08\0\0\0\x07\x00" + struct.pack("<HHII", 0x0112, 3, 1, 6) + b"\x01\x02\x03"
    data = encode(asymmetric(), "JPEG")
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + data[2:]


def test_broken_exif_makes_pillow_warn() -> None:
    with pytest.warns(UserWarning, match="EXIF"):
        Image.open(io.BytesIO(broken_exif())).getexif()


@pytest.mark.parametrize("action", ["error", "always", "default"])
@pytest.mark.parametrize("exif_transpose", [False, True])
def test_case_63_broken_exif_is_silent_and_not_fatal(action: Any, exif_transpose: bool) -> None:
    decoder = make_decoder("pil", exif_transpose=exif_transpose)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        for _ in range(3):
            assert decoder(broken_exif()).size in ((16, 8), (8, 16))
    assert not shown


def test_case_63_broken_metadata_of_real_files_is_silent(shared_data: Path) -> None:
    for name in (
        "bad-exif.jpg",
        "two-exif-blocks.jpg",
        "trailing-garbage.jpg",
        "extraneous-data.jpg",
        "icc-after-sof.jpg",
    ):
        make_decoder("pil", exif_transpose=True)((shared_data / "hard" / name).read_bytes())


def test_once_per_place_warnings_of_others_stay_once_per_place(small: Any) -> None:
    """Playing with the filters would void Python's record of what was shown: a line a sample in the log."""

    def transform(image: Image.Image) -> Image.Image:
        warnings.warn("from the user's transform", UserWarning, stacklevel=1)
        return image

    dataset = ShardDataset(small.root, transform=transform)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        list(dataset)
    assert [str(warning.message) for warning in shown] == ["from the user's transform"]


def test_warnings_of_others_pass_while_pillow_is_quiet() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with quiet_pillow() as seen:
            warnings.warn("mine", UserWarning, stacklevel=1)
            Image.open(io.BytesIO(broken_exif())).getexif()
            assert seen.count == 1
    assert [str(warning.message) for warning in shown] == ["mine"]


def test_errors_made_of_others_warnings_pass_while_pillow_is_quiet() -> None:
    with quiet_pillow(), pytest.raises(UserWarning, match="mine"):
        warnings.warn("mine", UserWarning, stacklevel=1)


# -- the pixel limit (case 65)


def test_max_pixels_is_the_largest_picture_that_is_decoded(small: Any) -> None:
    size = 9 * 8
    assert ShardDataset(small.root, max_pixels=size)[0].image.size == (9, 8)
    with pytest.raises(RecordDecodeError, match=f"exceeds limit of {size - 1} pixels") as caught:
        ShardDataset(small.root, max_pixels=size - 1)[0]
    assert (caught.value.position, caught.value.key) == (0, b"a/0.png")
    assert isinstance(caught.value.__cause__, Image.DecompressionBombError)


def test_case_65_default_keeps_pillows_guard_and_the_option_lifts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(picture("L", (50, 50)), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)  # a warning above, an error above twice that
    assert to_pil(data).size == (50, 50)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(Image.DecompressionBombError):
        to_pil(data)
    assert make_decoder("pil", max_pixels=2500)(data).size == (50, 50)
    with pytest.raises(Image.DecompressionBombError):
        make_decoder("pil", max_pixels=2499)(data)
    assert Image.MAX_IMAGE_PIXELS == 1000


def test_case_65_guard_switched_off_by_the_user_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert to_pil(encode(picture("L", (50, 50)), "PNG")).size == (50, 50)


def test_case_65_real_bomb_is_refused_without_being_decoded() -> None:
    image = Image.new("1", (14_000, 14_000))
    with pytest.raises(Image.DecompressionBombError):
        to_pil(encode(image, "PNG"))


# -- what is global to the process


def switches() -> tuple[Any, ...]:
    return (
        Image.MAX_IMAGE_PIXELS,
        ImageFile.LOAD_TRUNCATED_IMAGES,
        id(warnings.filters),
        list(warnings.filters),
        warnings.showwarning,
    )


@pytest.mark.parametrize("max_pixels", [None, 10**9])
def test_nothing_global_is_left_changed(max_pixels: int | None) -> None:
    before = switches()
    decoder = make_decoder("pil", exif_transpose=True, max_pixels=max_pixels)
    for data in (
        broken_exif(),
        b"\xff\xd8\xffno",
        b"",
        encode(asymmetric(), "JPEG")[:300],
        encode(picture("LA"), "PNG"),
    ):
        with contextlib.suppress(OSError, SyntaxError):
            decoder(data)
        assert switches() == before
    with pytest.raises(Image.DecompressionBombError):
        make_decoder("pil", max_pixels=1)(broken_exif())
    assert switches() == before


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run; raise the first error."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            start.wait(30)
            work(number)
        except BaseException as error:  # noqa: BLE001  a thread's exception would be lost
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("max_pixels", [None, 10**9])
def test_eight_threads_decode_silently_and_leave_nothing_changed(max_pixels: int | None) -> None:
    before = switches()
    good, bad = encode(asymmetric(), "JPEG"), broken_exif()
    expected = [to_pil(good).tobytes(), to_pil(bad).tobytes()]
    decoder = make_decoder("pil", max_pixels=max_pixels)

    def work(number: int) -> None:
        for turn in range(60):
            which = (number + turn) % 2
            assert decoder((good, bad)[which]).tobytes() == expected[which]
            with pytest.raises((OSError, SyntaxError)):
                decoder(good[:200])

    in_threads(8, work)
    assert switches() == before


def test_threads_with_different_limits_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two datasets in one process, one with ``max_pixels``: the second must not decode under the first one's limit."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    small, large = encode(picture("L", (5, 5)), "PNG"), encode(picture("L", (60, 60)), "PNG")
    inside, leave = threading.Event(), threading.Event()
    plain = decode.to_rgb
    held = threading.local()

    def slow(image: Image.Image) -> Image.Image:
        if getattr(held, "wait", False):
            inside.set()
            assert leave.wait(30)
        return plain(image)

    monkeypatch.setattr(decode, "to_rgb", slow)

    def hold(max_pixels: int | None) -> None:
        held.wait = True
        make_decoder("pil", max_pixels=max_pixels)(small)

    for of_the_first in (None, 10**9):
        inside.clear()
        leave.clear()
        thread = threading.Thread(target=hold, args=(of_the_first,))
        thread.start()
        try:
            assert inside.wait(30)
            assert make_decoder("pil", max_pixels=3600)(large).size == (60, 60)
            with pytest.raises(Image.DecompressionBombError):
                to_pil(large)
        finally:
            leave.set()
            thread.join()
    assert Image.MAX_IMAGE_PIXELS == 1000


def test_fork_while_another_thread_decodes_leaves_the_child_free_to_decode(in_child: Callable[..., Any]) -> None:
    """A lock that another thread holds at fork() is never released in the child."""
    data = encode(asymmetric(), "JPEG")

    def child() -> tuple[Any, Any]:
        return to_pil(data).size, [*switches()[:2], warnings.showwarning.__qualname__]

    before = [*switches()[:2], warnings.showwarning.__qualname__]
    with imaging._guard.lock:
        assert in_child(child) == ((16, 8), before)


def test_fork_while_another_thread_decodes_leaves_nothing_changed_in_the_child(in_child: Callable[..., Any]) -> None:
    before = [*switches()[:2], len(warnings.filters), warnings.showwarning.__qualname__]
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with quiet_pillow():
            inside.set()
            leave.wait(30)

    def child() -> list[Any]:
        to_pil(encode(asymmetric(), "JPEG"))
        return [*switches()[:2], len(warnings.filters), warnings.showwarning.__qualname__]

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert inside.wait(30)
        after = in_child(child)
    finally:
        leave.set()
        thread.join()
    assert after == before


# -- the rest


def test_case_67_first_frame_is_the_image() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    for format, options in (("GIF", {}), ("TIFF", {}), ("PNG", {}), ("WEBP", {"lossless": True})):
        data = encode(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
        assert to_pil(data).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"hello", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"SIMPLE  =                    T", b"8BPS\0\1", b"<html>"],
)
def test_format_that_is_not_on_the_list_is_not_tried(data: bytes) -> None:
    with pytest.raises(OSError, match="not an image of a known format"):
        to_pil(data)


@pytest.mark.parametrize("param", DRAWABLE)
def test_sniff_names_the_format_pillow_finds(param: bytes) -> None:
    found = Image.open(io.BytesIO(param)).format
    assert sniff(param) == ("JPEG" if found == "MPO" else found)


def test_dataset_names_the_picture_that_cannot_be_decoded(
    container: str, tmp_path: Path, write_set: Callable[..., Path]
) -> None:
    good = encode(asymmetric(), "JPEG")
    records = [(good, b"a/0.jpg", 0), (good[: len(good) // 2], b"a/\xff.jpg", 0), (b"text", b"a/2.jpg", 0)]
    dataset = ShardDataset(write_set(tmp_path / "set", container, [records]))
    assert dataset[0].image.size == (16, 8)
    for index in (1, 2):
        with pytest.raises(RecordDecodeError, match=f"sample {index} ") as caught:
            dataset[index]
        error = caught.value
        assert (error.shard_path, error.position, error.key) == (
            dataset.manifest.shard_path(str(tmp_path / "set"), 0),
            index,
            records[index][1],
        )
        assert repr(dataset.key(index)) in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.shard_path, again.position, again.key) == (
            str(error),
            error.shard_path,
            index,
            error.key,
        )
        with pytest.raises(RecordDecodeError):
            dataset.__getitems__([0, index])


def test_decoders_by_name() -> None:
    data = encode(asymmetric(), "PNG")
    assert make_decoder("bytes") is None
    assert make_decoder(len) is len
    assert isinstance(to_pil(data), Image.Image)
    assert isinstance(to_tensor(data), torch.Tensor)
    with pytest.raises(ValueError, match="decode must be one of pil, tensor, bytes or a callable, got 'rgb'"):
        make_decoder("rgb")


def test_decoders_pickle() -> None:
    data = oriented("JPEG", 6)
    for name in ("pil", "tensor"):
        decoder = make_decoder(name, exif_transpose=True, max_pixels=1000)
        again = pickle.loads(pickle.dumps(decoder))
        assert (pixels(again(data)) == pixels(decoder(data))).all()


def test_samples_own_their_memory() -> None:
    data = encode(asymmetric(), "PNG")
    first, second = to_tensor(data), to_tensor(data)
    first.zero_()
    assert second.sum() > 0


def tensors_both_ways(data: bytes, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """What "tensor" makes of an image with simplejpeg and without; an error's type where it raises."""
    found: list[Any] = []
    for module in (pytest.importorskip("simplejpeg"), None):
        with monkeypatch.context() as patch:
            patch.setattr("readers.decode.simplejpeg", module)
            try:
                found.append(make_decoder("tensor", **options)(data).tolist())  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001  whatever it is, both ways must agree
                found.append(type(error))
    return found


@pytest.mark.parametrize("quality", [30, 85, 100])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("size", [(64, 48), (65, 49), (1, 1), (17, 200)])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_simplejpeg_gives_the_pixels_of_pillow(
    draw_image: Any, monkeypatch: pytest.MonkeyPatch, quality: int, subsampling: int, size: tuple[int, int], mode: str
) -> None:
    for progressive in (False, True):
        data = draw_image(1, size, mode, quality=quality, subsampling=subsampling, progressive=progressive)
        fast, plain = tensors_both_ways(data, monkeypatch)
        assert fast == plain


def test_simplejpeg_gives_the_pixels_of_pillow_on_photos_and_hard_files(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [*sorted((shared_data / "photos").rglob("*.jpg"))[::20], *sorted((shared_data / "hard").iterdir())]
    for path in files:
        if path.stat().st_size < 200_000:
            fast, plain = tensors_both_ways(path.read_bytes(), monkeypatch)
            assert fast == plain, path.name


def test_simplejpeg_respects_the_pixel_limits(draw_image: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = draw_image(1, (64, 48))
    assert tensors_both_ways(data, monkeypatch, max_pixels=64 * 48 - 1) == [Image.DecompressionBombError] * 2
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert tensors_both_ways(data, monkeypatch) == [Image.DecompressionBombError] * 2
