"""Stored bytes -> pixels.

RGB means what ``PIL.Image.open(file).convert("RGB")`` gives, with two exceptions, both chosen so that
no mode surprises in training:

- transparency is composited over white, in every mode in which Pillow finds it (its ``convert`` drops
  the alpha channel and shows whatever colour lies hidden under it);
- gray with 16 bits is scaled to 8 (``value >> 8``, as Pillow itself does for 16-bit colour), not clipped.

TIFFs with an orientation come upright, since Pillow turns them while loading; other formats only on request.
The first frame of an animation or page of a document is the image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from .imaging import ORIENTATIONS, open_image, orientation_of, quiet_pillow

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

if TYPE_CHECKING:
    import torch

__all__ = ["Decoder", "make_decoder", "to_rgb"]

Decoder = Callable[[bytes], Any]
_JPEG_START: Final = b"\xff\xd8\xff"
_FAST_MOST_PIXELS: Final = 1 << 24
DECODE_NAMES: Final = ("pil", "tensor", "bytes")
_WHITE: Final = (255, 255, 255)


def make_decoder(
    decode: str | Decoder, *, exif_transpose: bool = False, max_pixels: int | None = None
) -> Decoder | None:
    """The function that turns a record's bytes into an image; None leaves the bytes as they are.

    Args:
        decode: "pil" (PIL.Image, RGB), "tensor" (uint8 ``(3, H, W)``), "bytes", or any callable.
        exif_transpose: Turn the picture upright by its EXIF orientation.
        max_pixels: Refuse larger images; None keeps Pillow's limit.

    Raises:
        ValueError: An unknown name.
    """
    if callable(decode):
        return decode
    if decode == "bytes":
        return None
    if decode == "pil":
        return _PilDecoder(exif_transpose, max_pixels)
    if decode == "tensor":
        return _TensorDecoder(exif_transpose, max_pixels)
    raise ValueError(f"decode must be one of {', '.join(DECODE_NAMES)} or a callable, got {decode!r}")


class _PilDecoder:
    """Bytes -> PIL image, mode RGB. An object, not a closure: it must pickle."""

    def __init__(self, exif_transpose: bool, max_pixels: int | None) -> None:
        self._exif_transpose = exif_transpose
        self._max_pixels = max_pixels

    def __call__(self, data: bytes) -> Image.Image:
        with quiet_pillow():
            image = open_image(data, self._max_pixels)
            image.load()  # first: Pillow turns TIFFs upright by itself here, and drops the tag
            turn = ORIENTATIONS.get(_orientation_or_0(image)) if self._exif_transpose else None
            rgb = to_rgb(image)
            return rgb if turn is None else rgb.transpose(turn)


class _TensorDecoder:
    """Bytes -> uint8 tensor ``(3, H, W)``."""

    def __init__(self, exif_transpose: bool, max_pixels: int | None) -> None:
        self._to_pil = _PilDecoder(exif_transpose, max_pixels)
        self._may_be_fast = not exif_transpose
        self._max_pixels = max_pixels

    def __call__(self, data: bytes) -> torch.Tensor:
        import torch

        pixels = _plain_jpeg(data, self._max_pixels) if self._may_be_fast else None
        if pixels is None:
            pixels = np.array(self._to_pil(data))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _plain_jpeg(data: bytes, max_pixels: int | None) -> npt.NDArray[np.uint8] | None:
    """A JPEG by simplejpeg (extra "fast"): the pixels of Pillow's path, in less time; None for all else.

    What simplejpeg refuses or converts in another way than Pillow (CMYK, damaged files) goes to Pillow.
    """
    if simplejpeg is None or not data.startswith(_JPEG_START):
        return None
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        # Pillow's path looks at the limits, so whatever might be over one goes there.
        limits = (_FAST_MOST_PIXELS, max_pixels, Image.MAX_IMAGE_PIXELS)
        if colorspace not in ("YCbCr", "Gray") or height * width > min(n for n in limits if n is not None):
            return None
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:
        return None
    return pixels


def _orientation_or_0(image: Image.Image) -> int:
    try:
        return orientation_of(image)
    except Exception:  # noqa: BLE001  broken EXIF raises almost anything; the picture itself is good
        return 0


def to_rgb(image: Image.Image) -> Image.Image:
    """An opened image in mode RGB, by the rule at the top of this module."""
    if _is_16_bit_gray(image):  # first: Pillow clips these on the way to RGBA, too
        return _gray_16_to_rgb(image)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        flat = Image.new("RGB", rgba.size, _WHITE)
        flat.paste(rgba, mask=rgba.getchannel("A"))
        return flat
    return image.convert("RGB")


def _is_16_bit_gray(image: Image.Image) -> bool:
    # PNG and PPM with 16 bits arrive as mode "I" in some Pillow versions; "I" from elsewhere has 32 bits.
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _gray_16_to_rgb(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    scaled = (np.clip(values, 0, 65535) >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        scaled[values == transparent] = 255
    return Image.fromarray(scaled).convert("RGB")
