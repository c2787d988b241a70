"""LMDB shards, read by the places of their values, without the LMDB library.

Plain lmdb reads the same file: ``%010d/image``, ``%010d/key``, ``header`` and ``index/%06d``.
"""

from __future__ import annotations

from ..layout import ROW_BYTES
from ..lmdb_pages import LmdbFile, LmdbPageError, Place
from .header import MAX_HEADER_BYTES, Geometry, Read, ShardFormatError, natural, parse_header

__all__ = ["locate"]

_MOST_ROWS = 1 << 32


def locate(read: Read, file_bytes: int) -> Geometry:
    """Find index and values of an LMDB shard.

    Raises:
        ShardFormatError: The tree or the header is damaged or does not fit the file.
    """
    try:
        return _locate(LmdbFile(read, file_bytes), read, file_bytes)
    except LmdbPageError as error:
        raise ShardFormatError(f"the LMDB file is damaged: {error}") from error


def _locate(file: LmdbFile, read: Read, file_bytes: int) -> Geometry:
    place = _find(file, b"header", MAX_HEADER_BYTES)
    header = parse_header(read(place.length, place.offset), "lmdb")
    records = natural(header, "records", file_bytes // ROW_BYTES)
    block_rows = max(natural(header, "block_rows", _MOST_ROWS), 1)
    blocks = tuple(
        _find(file, b"index/%06d" % number, exactly=min(block_rows, records - first) * ROW_BYTES).offset
        for number, first in enumerate(range(0, records, block_rows))
    )
    return Geometry(
        shard_id=header["shard_id"],
        records=records,
        index_blocks=blocks,
        block_rows=block_rows,
        values_offset=0,
        values_bytes=file_bytes,
    )


def _find(file: LmdbFile, key: bytes, most: int | None = None, exactly: int | None = None) -> Place:
    place = file.find(key)
    if place is None:
        raise ShardFormatError(f"it has no {key.decode()!r}")
    if (most is not None and place.length > most) or (exactly is not None and place.length != exactly):
        raise ShardFormatError(f"{key.decode()!r} has {place.length:,} bytes")
    return place
