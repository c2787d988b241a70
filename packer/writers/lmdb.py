"""LMDB shards (0.9 format): ``%010d/image``, ``%010d/key``, ``header``, ``index/%06d``.

Values are put in key order and committed by bytes, not by record. When all is committed, the places
where the values have come to lie are looked up and written into the index, so that readers need no
look-up and no LMDB at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

import lmdb

from readers.layout import ROW_BYTES, canonical_json
from readers.lmdb_pages import LmdbFile

from ..errors import PackError
from ..items import Record
from ..publish import PrivateFile
from .index import BLOCK_ROWS, Finished, IndexRows, ShardWriter, header

__all__ = ["LmdbWriter"]

# Both are part of what determines the bytes of a shard: a commit copies the tree's last pages.
_COMMIT_BYTES: Final = 16 << 20
#: Map grown ahead of a transaction, as a multiple of its bytes: a value of just over half a page takes a whole one.
_MAP_FACTOR: Final = 3
_VALUE_OVERHEAD: Final = 64  # bytes: node header, key, page header


class LmdbWriter(ShardWriter):
    """Writes one LMDB shard."""

    def __init__(self, private: PrivateFile) -> None:
        self._private = private
        self._rows = IndexRows()
        self._map_bytes = _MAP_FACTOR * _COMMIT_BYTES
        with _translated():
            self._env = lmdb.open(
                private.path,
                subdir=False,
                lock=False,  # nobody else knows the private name
                sync=False,  # flushed once, by publishing
                metasync=False,
                max_dbs=0,
                map_size=self._map_bytes,
            )
        self._txn: lmdb.Transaction | None = None
        self._txn_bytes = 0

    def add(self, record: Record) -> None:
        """Put image and key; their places are filled in by `finish`."""
        position = self._rows.count
        self._rows.add(record, 0, 0)
        self._put(b"%010d/image" % position, record.image)
        self._put(b"%010d/key" % position, record.key)

    def finish(self) -> Finished:
        """Put header and index, then fill in the places of the values."""
        self._put(b"header", self._header(self._rows.finished()))
        for number, block in enumerate(self._rows.blocks):
            self._put(b"index/%06d" % number, block)
        self._commit()
        self._env.close()
        return self._fill_in_places()

    def abandon(self) -> None:
        """Close the environment."""
        with contextlib.suppress(lmdb.Error):
            if self._txn is not None:
                self._txn.abort()
        self._env.close()

    def _put(self, key: bytes, value: bytes | bytearray) -> None:
        size = len(value) + _VALUE_OVERHEAD
        if self._txn_bytes and self._txn_bytes + size > _COMMIT_BYTES:
            self._commit()
        with _translated():
            if self._txn is None:
                self._make_room(size)
                self._txn = self._env.begin(write=True)
            self._txn.put(key, value, append=True)
        self._txn_bytes += size

    def _make_room(self, size: int) -> None:
        """Let the map hold one more transaction: it is never much larger than the data."""
        page_bytes = self._env.stat()["psize"]
        used = (self._env.info()["last_pgno"] + 1) * page_bytes
        needed = used + _MAP_FACTOR * max(_COMMIT_BYTES, size)
        if needed > self._map_bytes:
            self._map_bytes = needed
            self._env.set_mapsize(needed)

    def _commit(self) -> None:
        if self._txn is not None:
            with _translated():
                self._txn.commit()
        self._txn, self._txn_bytes = None, 0

    @staticmethod
    def _header(finished: Finished) -> bytes:
        return canonical_json(header("lmdb", finished, block_rows=BLOCK_ROWS))

    def _fill_in_places(self) -> Finished:
        fd = self._private.fd
        pages = LmdbFile(lambda length, offset: os.pread(fd, length, offset), os.fstat(fd).st_size)
        targets: dict[bytes, int] = {}
        for key, place in pages.items():
            position, _, field = key.partition(b"/")
            if position.isdigit():
                self._rows.set_offset(int(position), field.decode(), place.offset)
            else:
                targets[key] = place.offset
        finished = self._rows.finished()
        # Same lengths as before, so overwriting is safe: only shard_id and offsets have changed.
        self._private.write_at(targets[b"header"], self._header(finished))
        for number, block in enumerate(self._rows.blocks):
            assert len(block) <= BLOCK_ROWS * ROW_BYTES
            self._private.write_at(targets[b"index/%06d" % number], block)
        return finished


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """LMDB reports a full disk as an I/O error: say what it most likely is."""
    try:
        yield
    except lmdb.DiskError as error:
        raise OSError(errno.ENOSPC, "no space left for an LMDB shard") from error
    except lmdb.MemoryError as error:
        raise MemoryError(str(error)) from error
    except lmdb.Error as error:
        text = str(error)
        if "No space left" in text or "Input/output error" in text or "File too large" in text:
            raise OSError(errno.ENOSPC, f"no space left for an LMDB shard ({text})") from error
        raise PackError(f"LMDB failed: {text}. This is a fault of shardpack or of LMDB, not of your images") from error
