"""The shards that this process has open: one handle a file, bounded, never carried over ``fork``.

A `Shard` keeps its checked header and its mapped index; its descriptor may be closed and reopened
behind it, so that hundreds of shards work with few descriptors. Reading is ``pread`` on that
descriptor: no library call, no lock held, the GIL released.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Iterator
from itertools import repeat
from typing import Any, Final
from weakref import WeakValueDictionary, ref

import google_crc32c
import numpy as np
import numpy.typing as npt

from .errors import ReaderError, RecordCorruptError, ShardCorruptError, ShardNotFoundError
from .layout import INDEX_DTYPE, ROW_BYTES, digest, key_to_str
from .manifest import Manifest, missing_shard
from .shards import LOCATE, Geometry, ShardFormatError
from .system import O_READ, descriptor_limit, map_file, pread

__all__ = ["Shard", "open_shard"]

#: The parts of an index row that a sample needs: image offset, length, CRC-32C; label.
_IMAGE_ROW: Final = struct.Struct("<QII16xq")
_KEY_ROW: Final = struct.Struct("<16xQII")

#: Most descriptors held; of the process's limit an eighth, at least these, are left to others (pipes, sockets, h5py).
_MOST_DESCRIPTORS: Final = 1024
_ASK_EVERY: Final = 64
_LEFT_TO_USER: Final = 48

#: Fewer records than this are read one by one: gathering their rows at once would cost more.
_FEW: Final = 16
#: Records read before their checksums are computed: few enough to be in the processor's cache still.
_AT_ONCE: Final = 16

# Bound here: they run for every record, or (open, close) for every record of a set with more shards than descriptors.
_crc32c = google_crc32c.value
_open, _close, _getpid = os.open, os.close, os.getpid


class _File:
    """An open descriptor; closed when the last user lets go, so never under a thread that reads."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        _close(self.fd)


class Shard:
    """One shard, opened in this process and checked against the manifest.

    Attributes:
        path: The shard's file.
        records: Number of records.
        pid: The process that opened it; it is never used in another.
        shard_id: BLAKE3-128 of its index.
        reference: A weak reference to it.
        values_offset: Where the offsets of its index count from, in bytes from the start of the file.
    """

    __slots__ = (
        "__weakref__",
        "_block_rows",
        "_blocks",
        "_file",
        "_identity",
        "_rows",
        "_values_bytes",
        "path",
        "pid",
        "records",
        "reference",
        "shard_id",
        "values_offset",
    )  # fmt: skip

    def __init__(self, path: str, shard_id: str, records: int, file_bytes: int, container: str) -> None:
        self.path = path
        self.pid = os.getpid()
        self.shard_id = shard_id
        self.records = records
        self.reference = ref(self)
        self._file: _File | None = _File(_open(path, O_READ))
        fd = self._file.fd
        stat = os.fstat(fd)
        self._identity = (stat.st_dev, stat.st_ino)
        self._check(stat.st_size == file_bytes, f"{stat.st_size:,} bytes, the manifest says {file_bytes:,}")
        try:
            geometry = LOCATE[container](lambda length, offset: pread(fd, length, offset), file_bytes)
        except ShardFormatError as error:
            raise ShardCorruptError(f"{path}: {error}. Copy it again or repack the set") from error
        self._check(geometry.shard_id == shard_id, "another shard's id: shards were swapped or mixed")
        self._check(geometry.records == records, f"{geometry.records:,} records, not {records:,}")
        self.values_offset, self._values_bytes = geometry.values_offset, geometry.values_bytes
        self._block_rows = geometry.block_rows
        self._map_index(fd, geometry)

    def _check(self, good: bool, found: str) -> None:
        if not good:
            raise ShardCorruptError(f"{self.path}: {found}. Copy it again or repack the set")

    def _map_index(self, fd: int, geometry: Geometry) -> None:
        """Map the index, and prove it whole: a flipped bit here would be a wrong label or a wrong image."""
        first = min(geometry.index_blocks, default=0)
        self._blocks = tuple(offset - first for offset in geometry.index_blocks)
        if not self.records:
            self._rows = memoryview(b"")
            return
        self._rows = map_file(fd, first, max(start + size for start, size in self._block_extents()))
        blocks = (self._rows[start : start + size] for start, size in self._block_extents())
        self._check(digest(*blocks) == self.shard_id, "the index does not match its checksum")

    def _block_extents(self) -> Iterator[tuple[int, int]]:
        """(start, bytes) of each block of rows in the mapping."""
        for number, start in enumerate(self._blocks):
            yield start, min(self._block_rows, self.records - number * self._block_rows) * ROW_BYTES

    def rows(self) -> npt.NDArray[Any]:
        """The index: structured array ``(records,)`` of `layout.INDEX_DTYPE`; mapped, not copied, if in one block."""
        parts = self._parts()
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, INDEX_DTYPE)

    def _parts(self) -> list[npt.NDArray[Any]]:
        return [
            np.frombuffer(self._rows, INDEX_DTYPE, size // ROW_BYTES, start) for start, size in self._block_extents()
        ]

    def image(self, position: int) -> tuple[bytes, int]:
        """(encoded image, label) of the record at ``position`` in ``[0, records)``.

        Raises:
            RecordCorruptError: The bytes do not match their checksum, or the file has become shorter.
        """
        offset, length, crc, label = _IMAGE_ROW.unpack_from(self._rows, self._row_start(position))
        if offset + length <= self._values_bytes:
            file = self._file or _reopen(self)  # held until the read is done: eviction must not close it
            data = pread(file.fd, length, self.values_offset + offset)
            if _crc32c(data) == crc:
                return data, label
        return self._second_look(position, "image", offset, length, crc), label

    def images(self, positions: npt.NDArray[np.int64]) -> tuple[list[bytes], list[int]]:
        """Encoded images and labels of several records, read in the order given.

        Raises:
            RecordCorruptError: As for `image`.
        """
        rows = self._picked(positions) if len(positions) >= _FEW else None
        if rows is None or not self._inside(rows):
            pairs = [self.image(position) for position in positions.tolist()]
            return [data for data, _ in pairs], [label for _, label in pairs]
        file = self._file or _reopen(self)
        places = (rows["image_offset"].astype(np.int64) + self.values_offset).tolist()
        lengths, crcs = rows["image_length"].tolist(), rows["image_crc32c"].tolist()
        images: list[bytes] = []
        for start in range(0, len(places), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            read = list(map(pread, repeat(file.fd), lengths[part], places[part]))
            if list(map(_crc32c, read)) != crcs[part]:
                read = [self.image(position)[0] for position in positions[part].tolist()]
            images += read
        return images, rows["label"].tolist()

    def _inside(self, rows: npt.NDArray[Any]) -> bool:
        """Whether all these images lie in the part of the file that holds values."""
        limit, offsets = self._values_bytes, rows["image_offset"]
        return bool(offsets.max() <= limit and (offsets + rows["image_length"]).max() <= limit)

    def _picked(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Copies of the index rows at ``positions``."""
        parts = self._parts()
        if len(parts) == 1:
            picked: npt.NDArray[Any] = parts[0][positions]
            return picked
        blocks, rows = np.divmod(positions, self._block_rows)
        picked = np.empty(len(positions), INDEX_DTYPE)
        for block in np.unique(blocks).tolist():
            inside = blocks == block
            picked[inside] = parts[block][rows[inside]]
        return picked

    def label(self, position: int) -> int:
        """Label of the record at ``position``."""
        label: int = _IMAGE_ROW.unpack_from(self._rows, self._row_start(position))[3]
        return label

    def key(self, position: int) -> bytes:
        """Key of the record at ``position``."""
        offset, length, crc = _KEY_ROW.unpack_from(self._rows, self._row_start(position))
        return self._second_look(position, "key", offset, length, crc)

    def _row_start(self, position: int) -> int:
        if position < self._block_rows:
            return self._blocks[0] + position * ROW_BYTES
        block, row = divmod(position, self._block_rows)
        return self._blocks[block] + row * ROW_BYTES

    def _second_look(self, position: int, field: str, offset: int, length: int, crc: int) -> bytes:
        """Read a value patiently: a short read is finished, and what stays wrong is reported."""
        data = b""
        if offset + length <= self._values_bytes:
            file = self._file or _reopen(self)
            data = _read_whole(file.fd, length, self.values_offset + offset)
            if _crc32c(data) == crc and len(data) == length:
                return data
            # Asked only now: looking at each reopened file would cost more than opening it.
            stat = os.fstat(file.fd)
            self._check((stat.st_dev, stat.st_ino) == self._identity, "replaced while it was in use")
        raise self._corrupt(position, field, len(data), length)

    def _corrupt(self, position: int, field: str, found: int, length: int) -> RecordCorruptError:
        key = None if field == "key" else self._key_or_none(position)
        name = "" if key is None else f" (key {key_to_str(key)!r})"
        what = "do not match their checksum" if found == length else f"end after {found:,}"
        return RecordCorruptError(
            f"{self.path}: record {position}{name}: the {length:,} bytes of {field!r} {what}. "
            "Run `shards verify` on the set, then copy the shard again or repack",
            self.path, position, key,
        )  # fmt: skip

    def _key_or_none(self, position: int) -> bytes | None:
        try:
            return self.key(position)
        except (ReaderError, OSError):
            return None

    def reopen_file(self) -> _File:
        """Open the descriptor again; what is read through it is checked as ever."""
        try:
            file = self._file = _File(_open(self.path, O_READ))
        except FileNotFoundError:
            raise ShardNotFoundError(f"{self.path}: the shard was deleted while it was in use") from None
        return file

    def __repr__(self) -> str:
        return f"Shard({self.path!r}, {self.records:,} records)"


def _read_whole(fd: int, length: int, offset: int) -> bytes:
    """``length`` bytes, or fewer at the end of the file; goes on after short reads (signals, network file systems)."""
    data = b""
    while len(data) < length:
        more = pread(fd, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def _share(limit: int) -> int:
    """Descriptors of a process's limit that shards may take."""
    return limit - max(_LEFT_TO_USER, limit // 8)


class _Handles:
    """This process's handles. A forked child gets a new, empty one (see `_handles`)."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        # Made anew in a child: a lock that another thread held at fork() would never be released there.
        self.lock = threading.Lock()
        # Weak: a shard lives as long as a dataset that reads it.
        self.shards: WeakValueDictionary[tuple[str, str], Shard] = WeakValueDictionary()
        self._opened: deque[ref[Shard]] = deque()
        self._most = 0
        self._until_asked = 0

    def keep_file(self, shard: Shard) -> None:
        """Count a shard's descriptor; the one opened longest ago is closed when there are too many."""
        self._opened.append(shard.reference)
        if self._until_asked == 0:  # the limit may change while we run, but asking each time would cost a fifth
            self._most = max(1, min(_MOST_DESCRIPTORS, _share(descriptor_limit())))
            self._until_asked = _ASK_EVERY
        self._until_asked -= 1
        while len(self._opened) > self._most:
            oldest = self._opened.popleft()()
            if oldest is not None:
                oldest._file = None  # closed when nobody reads through it any more


_current = _Handles()


def _handles() -> _Handles:
    global _current
    if _current.pid != _getpid():
        # An inherited descriptor shares its file with the parent: drop it, and open our own.
        _current = _Handles()
    return _current


def _reopen(shard: Shard) -> _File:
    handles = _handles()
    with handles.lock:
        file = shard.reopen_file()
        handles.keep_file(shard)
        return file


def open_shard(root: str, manifest: Manifest, number: int) -> Shard:
    """The handle of a shard in this process, opened now or earlier, by whichever dataset.

    Raises:
        ShardNotFoundError, ShardCorruptError: It is missing, or not what the manifest describes.
    """
    path = manifest.shard_path(root, number)
    expected = manifest.shard_ids[number]
    handles = _handles()
    with handles.lock:
        shard = handles.shards.get((path, expected))
        if shard is None:
            try:
                shard = Shard(
                    path,
                    expected,
                    manifest.shard_records[number],
                    manifest.shard_bytes[number],
                    manifest.container,
                )
            except FileNotFoundError:
                raise ShardNotFoundError(missing_shard(path, number, len(manifest.shard_ids))) from None
            handles.shards[path, expected] = shard
            handles.keep_file(shard)
        return shard
