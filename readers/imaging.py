"""The one place that opens an image with Pillow, the same way when packing and when reading.

Shared because both halves must agree: what the packer found good, the reader decodes, under the same
allow-list, the same pixel cap and the same silence.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import warnings
from collections.abc import Iterator
from io import BytesIO
from typing import Any, Final, cast

from PIL import Image, ImageFile, UnidentifiedImageError

__all__ = ["DEFAULT_MAX_PIXELS", "ORIENTATIONS", "open_image", "orientation_of", "quiet_pillow", "sniff"]

#: EXIF orientation -> the transposition that shows the picture upright. Source: ``PIL.ImageOps.exif_transpose``.
ORIENTATIONS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
#: Pillow's limit as shipped: larger images are a DecompressionBombError.
DEFAULT_MAX_PIXELS: Final = 178_956_970

_ORIENTATION_TAG: Final = 0x0112

# Pillow's own tests for the formats on the allow-list, first bytes only.
_MAGIC: Final = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"MM*\x00", "TIFF"),
    (b"II\x00*", "TIFF"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\x00\x00\x00\x0cjP  \x0d\x0a\x87\x0a", "JPEG2000"),
)
#: A filter as ``warnings.filterwarnings("always", module=r"PIL\.")`` would make it.
_PILLOW_ALWAYS: Final = ("always", None, Warning, re.compile(r"PIL\."), 0)
_PILLOW_PATH: Final = os.sep + "PIL" + os.sep

_PPM_KINDS: Final = b"123456fFy"
_AVIF_BRANDS: Final = (b"avif", b"avis", b"mif1", b"msf1")


def sniff(data: bytes) -> str | None:
    """Name of the format that the first bytes announce (a key of `layout.FORMAT_CODES`), or None."""
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp" and data[8:12] in _AVIF_BRANDS:
        return "AVIF"
    if data[:1] == b"P" and data[1:2] in {bytes([kind]) for kind in _PPM_KINDS}:
        return "PPM"
    return None


def open_image(data: bytes, max_pixels: int | None = None) -> Image.Image:
    """Open an encoded image; pixels are not decoded yet. Call inside `quiet_pillow`.

    Only the format that the bytes announce is tried, and only if it is on the allow-list.

    Args:
        data: The whole file.
        max_pixels: Refuse larger images (DecompressionBombError); None keeps Pillow's own limit.

    Raises:
        Anything that Pillow raises on bad input (OSError, ValueError, SyntaxError ...).
    """
    name = sniff(data)
    if name is None:
        raise UnidentifiedImageError("not an image of a known format")
    image = Image.open(BytesIO(data), formats=(name,))
    if max_pixels is not None and image.width * image.height > max_pixels:
        raise Image.DecompressionBombError(
            f"Image size ({image.width * image.height} pixels) exceeds limit of {max_pixels} pixels"
        )
    return image


def orientation_of(image: Image.Image) -> int:
    """EXIF (or XMP) orientation, 1 to 8; 0 where there is none or it is no such value.

    Raises:
        Anything that Pillow raises on a broken EXIF block.
    """
    value = image.getexif().get(_ORIENTATION_TAG)
    return value if isinstance(value, int) and 1 <= value <= 8 else 0


class _Seen(threading.local):
    """Warnings that Pillow issued in this thread inside `quiet_pillow`."""

    def __init__(self) -> None:
        self.count = 0


_seen = _Seen()
_lock = threading.Lock()
_users = 0
_restore = contextlib.ExitStack()


@contextlib.contextmanager
def quiet_pillow(max_pixels: int | None = None, *, strict: bool = False) -> Iterator[_Seen]:
    """Keep Pillow's warnings from the log, and from becoming errors, while decoding.

    Warnings issued by other modules pass as before. Pillow's switches are global to the process, so the first
    thread in sets them and the last one out puts back what it found; threads that are inside at the same
    time must agree on the arguments.

    Args:
        max_pixels: The limit that `open_image` is called with: Pillow's own makes way for it.
        strict: Truncated images are errors, whatever ``ImageFile.LOAD_TRUNCATED_IMAGES`` says.

    Yields:
        An object whose ``count`` is the number of warnings in this thread since entering, those about many
        pixels aside.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _enter(max_pixels, strict)
    _seen.count = 0
    try:
        yield _seen
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _restore.close()


def _enter(max_pixels: int | None, strict: bool) -> None:
    # Not warnings.catch_warnings(): entering and leaving it voids every module's record of warnings already
    # shown, so that a warning of the user's own code would appear once a sample instead of once.
    filters = cast("list[Any]", warnings.filters)
    filters.insert(0, _PILLOW_ALWAYS)
    _restore.callback(_without_error, filters.remove, _PILLOW_ALWAYS)
    _swap(warnings, "showwarning", _count_or(warnings.showwarning))
    if max_pixels is not None:
        _swap(Image, "MAX_IMAGE_PIXELS", max_pixels)  # Pillow raises above twice this number, `open_image` above it
    if strict:
        _swap(ImageFile, "LOAD_TRUNCATED_IMAGES", False)


def _swap(module: Any, name: str, value: Any) -> None:
    _restore.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def _without_error(function: Any, argument: Any) -> None:
    with contextlib.suppress(ValueError):  # somebody has reset the filters meanwhile
        function(argument)


def _count_or(show: Any) -> Any:
    """A ``warnings.showwarning`` that counts Pillow's warnings and hands on all others."""

    def count_or_show(message: Any, category: Any, filename: str, *rest: Any, **named: Any) -> None:
        if _PILLOW_PATH in filename:
            _seen.count += not issubclass(category, Image.DecompressionBombWarning)
        else:
            show(message, category, filename, *rest, **named)

    return count_or_show
