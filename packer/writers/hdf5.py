"""HDF5 shards, written in one pass without libhdf5 ever touching the target.

libhdf5 crashes the process on a full disk (h5py/h5py#914). So values are written by ourselves to where
``/data`` begins, which does not depend on its size; at the end h5py lays out an empty file of the right
shape in memory, and its few KB of structure are copied around the values.
"""

from __future__ import annotations

import io
from functools import cache
from typing import Any, Final, NamedTuple

import google_crc32c
import h5py
import numpy as np

from readers.layout import FORMAT, HDF5_MAGIC, HDF5_PREFIX, INDEX_DTYPE, ROW_BYTES, VERSION, canonical_json

from ..items import Record
from ..publish import PrivateFile
from .index import Finished, IndexRows, ShardWriter, header

__all__ = ["Hdf5Writer"]

_USER_BLOCK: Final = 4096
_ALIGNMENT: Final = 64
_WRITE_BYTES: Final = 1 << 20
# Pinned, so that the same input gives the same bytes with any later libhdf5.
_LIBVER: Final = ("v110", "v110")


class Hdf5Writer(ShardWriter):
    """Writes one HDF5 shard: ``/data`` (uint8) and ``/index`` (one row a record)."""

    def __init__(self, private: PrivateFile) -> None:
        self._private = private
        self._rows = IndexRows()
        self._at = 0  # in /data
        self._data_offset = _data_offset()
        self._waiting: list[bytes] = []
        self._written = 0  # of what has been added

    def add(self, record: Record) -> None:
        """Append image and key, side by side."""
        key_at = self._at + len(record.image)
        self._rows.add(record, self._at, key_at)
        self._waiting += (record.image, record.key)
        self._at = key_at + len(record.key)
        if self._at - self._written >= _WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        """Write what has been added: in large pieces, since small images would cost two calls each."""
        self._private.write_at(self._data_offset + self._written, b"".join(self._waiting))
        self._waiting.clear()
        self._written = self._at

    def finish(self) -> Finished:
        """Put HDF5's structure, the index and last the header around the values."""
        self._write()
        finished = self._rows.finished()
        skeleton = _skeleton(finished.payload_bytes, finished.records)
        assert finished.records == 0 or skeleton.data_offset == self._data_offset
        for offset, data in skeleton.pieces:
            self._private.write_at(offset, data)
        index_at = skeleton.index_offset
        for block in self._rows.blocks:
            self._private.write_at(index_at, block)
            index_at += len(block)
        self._write_header(finished, skeleton)
        self._private.truncate(skeleton.total_bytes)
        return finished

    def _write_header(self, finished: Finished, skeleton: _Skeleton) -> None:
        data = canonical_json(
            header(
                "hdf5",
                finished,
                data={"offset": skeleton.data_offset, "size": finished.payload_bytes},
                index={"offset": skeleton.index_offset, "size": finished.records * ROW_BYTES},
            )
        )
        assert HDF5_PREFIX.size + len(data) <= _USER_BLOCK
        self._private.write_at(0, HDF5_PREFIX.pack(HDF5_MAGIC, len(data), google_crc32c.value(data)) + data)

    def abandon(self) -> None:
        """Nothing is held but the private file."""


class _Skeleton(NamedTuple):
    """An HDF5 file without its values: the pieces of structure, and where the values belong."""

    pieces: list[tuple[int, bytes]]
    total_bytes: int
    data_offset: int
    index_offset: int


@cache
def _data_offset() -> int:
    return _skeleton(1, 1).data_offset


def _skeleton(data_bytes: int, records: int) -> _Skeleton:
    target = _Pieces()
    # No alignment would start values anywhere; 64 bytes keeps index rows apart from others' cache lines.
    with h5py.File(
        target, "w", libver=_LIBVER, userblock_size=_USER_BLOCK,
        alignment_threshold=1, alignment_interval=_ALIGNMENT,
    ) as file:  # fmt: skip
        file.attrs["format"] = FORMAT
        file.attrs["version"] = VERSION
        data_offset = _contiguous(file, "data", data_bytes, np.dtype("u1"))
        index_offset = _contiguous(file, "index", records, INDEX_DTYPE)
    return _Skeleton(sorted(target.pieces.items()), target.size, data_offset, index_offset)


def _contiguous(file: Any, name: str, length: int, dtype: np.dtype[Any]) -> int:
    """Make a dataset of fixed place: contiguous, allocated now, never filled, no times. Returns its offset."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    space = h5py.h5s.create_simple((length,))
    dataset = h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(dtype), space, plist)
    # A dataset without elements has no place; any will do.
    return int(dataset.get_offset()) if length else 0


class _Pieces(io.RawIOBase):
    """A file object that keeps only what is written: terabytes of values cost nothing."""

    def __init__(self) -> None:
        self.pieces: dict[int, bytes] = {}
        self.size = 0
        self._at = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def truncate(self, size: int | None = None, /) -> int:
        self.size = self._at if size is None else size
        return self.size

    def write(self, data: Any, /) -> int:
        piece = bytes(data)
        self.pieces[self._at] = piece
        self._at += len(piece)
        self.size = max(self.size, self._at)
        return len(piece)

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self.size - self._at))
        view[:length] = bytes(length)
        for offset, piece in self.pieces.items():
            start, end = max(offset, self._at), min(offset + len(piece), self._at + length)
            if start < end:
                view[start - self._at : end - self._at] = piece[start - offset : end - offset]
        self._at += length
        return length
