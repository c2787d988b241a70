"""A file of the source -> a `Record`, or a `Reject` with its reason."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from PIL import Image, UnidentifiedImageError

from readers.imaging import DEFAULT_MAX_PIXELS, open_image, orientation_of, quiet_pillow, sniff
from readers.layout import FLAGS, FORMAT_CODES, MAX_VALUE_BYTES, MODE_CODES

from .errors import PackError
from .items import UNKNOWN, Record, Reject, SourceImage

__all__ = ["Ingest"]

# Without O_NONBLOCK, opening a named pipe waits for a writer that never comes.
_OPEN_FLAGS: Final = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY")
)
# Errors about one file; any other (EIO, ESTALE, EMFILE, ENOMEM ...) is about the machine and ends the run.
_FILE_ERRORS: Final = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.ELOOP: "unreadable",
    errno.ENAMETOOLONG: "unreadable",
    errno.ENXIO: "not-a-file",  # a socket
    errno.ENODEV: "not-a-file",
    errno.EISDIR: "not-a-file",
}
_IN_FLIGHT_BYTES: Final = 32 << 20
_IN_FLIGHT_FILES: Final = 4  # a thread
_WARN_PIXELS: Final = 89_478_485  # Pillow's MAX_IMAGE_PIXELS as shipped
_PNG_HEADER: Final = struct.Struct(">8x8xIIB")  # signature, chunk head; width, height, bits a channel


class Ingest:
    """Reads and checks files.

    Args:
        root: The source folder.
        check: "decode", "header" or "none" (see `PackOptions.check`).
        max_pixels: Reject larger images; None keeps Pillow's limit.
    """

    def __init__(self, root: str, check: str, max_pixels: int | None) -> None:
        self._root = os.fsencode(root) + b"/"
        self._check = check
        # Stated, so that a caller who has changed Pillow's own limit gets the same set.
        self._max_pixels = DEFAULT_MAX_PIXELS if max_pixels is None else max_pixels

    def each(self, images: Iterable[SourceImage], threads: int = 1) -> Generator[Record | Reject, None, None]:
        """Ingest files in order, ``threads`` at a time; holds at most 32 MiB or one file beyond that.

        Close it if you stop early: Pillow's switches stay turned until then.
        """
        with quiet_pillow(strict=True):  # once for all: `_look` then finds the switches turned
            if threads == 1:
                yield from map(self.one, images)
            else:
                yield from self._side_by_side(images, threads)

    def _side_by_side(self, images: Iterable[SourceImage], threads: int) -> Iterator[Record | Reject]:
        with ThreadPoolExecutor(threads, "ingest") as pool:
            flying: deque[tuple[int, Future[Record | Reject]]] = deque()
            total = 0
            try:
                for image in images:
                    size = max(image.size, 0)
                    while flying and (len(flying) >= _IN_FLIGHT_FILES * threads or total + size > _IN_FLIGHT_BYTES):
                        done, future = flying.popleft()
                        total -= done
                        yield future.result()
                    flying.append((size, pool.submit(self.one, image)))
                    total += size
                while flying:
                    yield flying.popleft()[1].result()
            finally:
                pool.shutdown(cancel_futures=True)

    def one(self, image: SourceImage) -> Record | Reject:
        """Ingest one file.

        Raises:
            PackError: Reading failed in a way that is not about this file.
        """
        data = self._read(image)
        if isinstance(data, Reject):
            return data
        if not data:
            return Reject(image.key, "empty", "0 bytes")
        name = sniff(data)
        if name is None:
            return Reject(image.key, "not-an-image", f"starts with {data[:8]!r}")
        if self._check == "none":
            return Record(data, image.key, image.label, 0, 0, 0, 0, 0, 0)
        return self._look(image, data, name)

    def _read(self, image: SourceImage) -> bytes | Reject:
        path = self._root + image.key
        try:
            fd = os.open(path, _OPEN_FLAGS)
            try:
                return _read_whole(fd, image)
            finally:
                os.close(fd)
        except OSError as error:
            reason = _FILE_ERRORS.get(error.errno or 0)
            if reason is None:
                raise PackError(
                    f"reading {os.fsdecode(path)!r} failed: {error.strerror}: the disk, the network or the machine "
                    "is in trouble, not the file. Rerun the same command to continue"
                ) from error
            return Reject(image.key, reason, error.strerror or "")

    def _look(self, image: SourceImage, data: bytes, name: str) -> Record | Reject:
        with quiet_pillow(strict=True) as seen:
            try:
                opened = open_image(data, self._max_pixels)
                width, height = opened.size  # before decoding, which may shrink it
                flags = _facts(opened, data)
                # Pillow turns TIFFs upright while it loads them, and drops the tag; PNGs have it after the pixels.
                early = self._check == "header" or opened.format == "TIFF"
                orientation, broken = _orientation(opened, may_load=False) if early else (0, False)
                if self._check == "decode":
                    _decode(opened)
                if not early:
                    orientation, broken = _orientation(opened)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001  Pillow raises almost anything on bad input
                return Reject(image.key, *_why(error, name))
            flags |= FLAGS["bad-metadata"] if broken or seen.count else 0
            flags |= FLAGS["large"] if width * height > _WARN_PIXELS else 0
        return Record(
            data, image.key, image.label, width, height,
            FORMAT_CODES.get(opened.format or "", 0), MODE_CODES.get(opened.mode, MODE_CODES["other"]),
            orientation, flags,
        )  # fmt: skip


def _read_whole(fd: int, image: SourceImage) -> bytes | Reject:
    # One byte more than expected: that the file has grown, or has not, shows without a second call.
    data = os.read(fd, image.size + 1) if image.size > 0 else b""
    return data if data and len(data) == image.size else _read_patiently(fd, image, data)


def _read_patiently(fd: int, image: SourceImage, data: bytes) -> bytes | Reject:
    """Whatever is not a regular file of the expected size, read in one go."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return Reject(image.key, "not-a-file", "a folder, pipe, socket or device")
    if status.st_size > MAX_VALUE_BYTES:
        return Reject(image.key, "too-large", f"{status.st_size:,} bytes")
    expected = status.st_size if image.size == UNKNOWN else image.size
    while len(data) <= expected:
        more = os.read(fd, expected + 1 - len(data))
        if not more:
            break
        data += more
    if len(data) != expected:
        return Reject(image.key, "changed", f"{expected:,} bytes when scanned, {status.st_size:,} when read")
    return data


def _decode(image: Image.Image) -> None:
    if image.format in ("JPEG", "MPO"):
        # An eighth of the size: libjpeg still reads the whole entropy stream, but skips most arithmetic.
        image.draft(None, (1, 1))
    image.load()


def _facts(image: Image.Image, data: bytes) -> int:
    """Flags that follow from the opened image."""
    flags = FLAGS["animated"] if getattr(image, "is_animated", False) else 0
    flags |= FLAGS["alpha"] if image.has_transparency_data else 0
    flags |= FLAGS["16-bit"] if _is_16_bit(image, data) else 0
    flags |= FLAGS["cmyk"] if image.mode == "CMYK" else 0
    return flags | (FLAGS["icc"] if image.info.get("icc_profile") else 0)


def _is_16_bit(image: Image.Image, data: bytes) -> bool:
    if image.format == "PNG":  # Pillow opens 16-bit colour as 8 bits
        return bool(_PNG_HEADER.unpack_from(data)[2] == 16)
    return image.mode.startswith(("I", "F")) or any(_has_16_bits(tile[3]) for tile in getattr(image, "tile", ()))


def _has_16_bits(arguments: Any) -> bool:
    """Whether a Pillow tile is stored in a raw mode such as "RGB;16B", or (PPM) up to a value above 255."""
    raw_mode, *rest = arguments if isinstance(arguments, tuple) and arguments else (arguments,)
    if not isinstance(raw_mode, str):
        return False
    return "16" in raw_mode or (raw_mode == "RGB" and len(rest) == 1 and isinstance(rest[0], int) and rest[0] > 255)


def _orientation(image: Image.Image, *, may_load: bool = True) -> tuple[int, bool]:
    """(EXIF orientation or 0, whether the metadata are broken)."""
    try:
        return orientation_of(image, may_load=may_load), False
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  broken EXIF raises almost anything; the picture itself is good
        return 0, True


def _why(error: Exception, name: str) -> tuple[str, str]:
    """(reason, detail) of an exception that Pillow raised."""
    text = str(error) or type(error).__name__
    if isinstance(error, Image.DecompressionBombError):
        return "too-many-pixels", text.partition(",")[0]
    if isinstance(error, UnidentifiedImageError):
        return "unsupported", f"starts like {name}, but Pillow cannot open it"
    return ("truncated" if "truncated" in text.lower() else "damaged"), text
