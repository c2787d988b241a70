"""The one place that opens an image with Pillow, the same way when packing and when reading.

Shared because both halves must agree: what the packer found good, the reader decodes, under the same
allow-list, the same pixel cap and the same silence.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
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

#: Where Pillow looks for the orientation of a JPEG.
_METADATA: Final = frozenset(("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"))
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
#: Modules of Pillow that may warn about an image.
_PILLOW_MODULES: Final = tuple(
    f"PIL.{name}"
    for name in (
        "Image", "ImageFile", "TiffImagePlugin", "JpegImagePlugin", "MpoImagePlugin", "PngImagePlugin",
        "GifImagePlugin",
        "WebPImagePlugin", "BmpImagePlugin", "PpmImagePlugin", "Jpeg2KImagePlugin", "AvifImagePlugin",
    )
)  # fmt: skip

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
        max_pixels: Refuse larger images (DecompressionBombError); None: as Pillow is set.

    Raises:
        Anything that Pillow raises on bad input (OSError, ValueError, SyntaxError ...).
    """
    name = sniff(data)
    if name is None:
        raise UnidentifiedImageError("not an image of a known format")
    image = Image.open(BytesIO(data), formats=(name,))
    limit = _guard.pixel_limit if max_pixels is None else max_pixels
    if limit is not None and image.width * image.height > limit:
        raise Image.DecompressionBombError(
            f"Image size ({image.width * image.height} pixels) exceeds limit of {limit} pixels"
        )
    return image


def orientation_of(image: Image.Image, *, may_load: bool = True) -> int:
    """EXIF (or XMP) orientation, 1 to 8; 0 where there is none or it is no such value.

    Args:
        image: An opened image.
        may_load: Decode a PNG if need be, whose metadata may stand behind the pixels.

    Raises:
        Anything that Pillow raises on a broken EXIF block, or on damaged pixels if it has to decode.
    """
    if image.format == "JPEG" and _METADATA.isdisjoint(image.info):
        return 0  # as below, in a tenth of the time: most files of a training set have no metadata
    exif = image.getexif() if may_load else Image.Image.getexif(image)
    value = exif.get(_ORIENTATION_TAG)
    return value if isinstance(value, int) and 1 <= value <= 8 else 0


class _Seen(threading.local):
    """Warnings that Pillow issued in this thread inside `quiet_pillow`."""

    def __init__(self) -> None:
        self.count = 0


class _Guard:
    """Pillow's switches while somebody decodes: the first thread in turns them, the last one out turns them back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pixel_limit: int | None = None  # Pillow's own, as the first thread found it
        self._users = 0
        self._restore = contextlib.ExitStack()

    def enter(self, strict: bool) -> None:
        with self.lock:
            self._users += 1
            if self._users == 1:
                self._turn(strict)

    def leave(self) -> None:
        with self.lock:
            self._users -= 1
            if self._users == 0:
                self.restore()

    def restore(self) -> None:
        """Put back what `_turn` found."""
        self._restore.close()

    def _turn(self, strict: bool) -> None:
        # Not warnings.catch_warnings(): entering and leaving it voids every module's record of warnings already
        # shown, so that a warning of the user's own code would appear once a sample instead of once.
        filters = cast("list[Any]", warnings.filters)
        filters.insert(0, _PILLOW_ALWAYS)
        self._restore.callback(_without_error, filters.remove, _PILLOW_ALWAYS)
        self._swap(warnings, "showwarning", _count_or(warnings.showwarning))
        # `open_image` looks at the limit instead: threads may have different ones.
        found = Image.MAX_IMAGE_PIXELS
        self.pixel_limit = None if found is None else 2 * found
        self._swap(Image, "MAX_IMAGE_PIXELS", None)
        if strict:
            self._swap(ImageFile, "LOAD_TRUNCATED_IMAGES", False)

    def _swap(self, module: Any, name: str, value: Any) -> None:
        self._restore.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)


_seen = _Seen()
_guard = _Guard()


def _after_fork() -> None:
    # The threads that were inside do not exist in the child: nobody would unlock or put back.
    global _guard
    inherited, _guard = _guard, _Guard()
    inherited.restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def quiet_pillow(*, strict: bool = False) -> Iterator[_Seen]:
    """Keep Pillow's warnings from the log, and from becoming errors, while decoding.

    Warnings issued by other modules pass as before, and Pillow's switches are put back at the end.

    Args:
        strict: For packing: truncated images are errors, whatever ``ImageFile.LOAD_TRUNCATED_IMAGES`` says, and
            warnings count even if the process has shown them before.

    Yields:
        An object whose ``count`` is the number of Pillow's warnings in this thread since entering; whoever stays
        inside for many images sets it to 0 before each.
    """
    _guard.enter(strict)
    if strict:
        _forget_shown_warnings()
    _seen.count = 0
    try:
        yield _seen
    finally:
        _guard.leave()


def _forget_shown_warnings() -> None:
    for name in _PILLOW_MODULES:
        registry = getattr(sys.modules.get(name), "__warningregistry__", None)
        if registry:
            registry.clear()


def _without_error(function: Any, argument: Any) -> None:
    with contextlib.suppress(ValueError):  # somebody has reset the filters meanwhile
        function(argument)


def _count_or(show: Any) -> Any:
    """A ``warnings.showwarning`` that counts Pillow's warnings and hands on all others."""

    def count_or_show(message: Any, category: Any, filename: str, *rest: Any, **named: Any) -> None:
        if _PILLOW_PATH in filename:
            _seen.count += 1
        else:
            show(message, category, filename, *rest, **named)

    return count_or_show
