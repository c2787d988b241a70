"""HDF5 shards, opened by our own header in the file's user block, without libhdf5.

Plain h5py reads the same file: ``f["data"][offset:offset + length]``, ``f["index"][position]``.
"""

from __future__ import annotations

from typing import Final

import google_crc32c

from ..layout import HDF5_MAGIC, HDF5_PREFIX, ROW_BYTES
from .header import MAX_HEADER_BYTES, Geometry, Read, ShardFormatError, extent, natural, parse_header

__all__ = ["locate"]

_FIRST_READ: Final = 4096  # the user block's usual size


def locate(read: Read, file_bytes: int) -> Geometry:
    """Find index and values of an HDF5 shard.

    Raises:
        ShardFormatError: The header is damaged or does not fit the file.
    """
    header = parse_header(_header_bytes(read), "hdf5")
    records = natural(header, "records", file_bytes // ROW_BYTES)
    index_offset, index_bytes = extent(header, "index", file_bytes)
    if index_bytes != records * ROW_BYTES:
        raise ShardFormatError(f"{index_bytes:,} bytes of index for {records:,} records")
    data_offset, data_bytes = extent(header, "data", file_bytes)
    return Geometry(
        shard_id=header["shard_id"],
        records=records,
        index_blocks=(index_offset,) if records else (),
        block_rows=max(records, 1),
        values_offset=data_offset,
        values_bytes=data_bytes,
    )


def _header_bytes(read: Read) -> bytes:
    block = read(_FIRST_READ, 0)
    if len(block) < HDF5_PREFIX.size:
        raise ShardFormatError("shorter than a header")
    magic, length, crc = HDF5_PREFIX.unpack_from(block)
    if magic != HDF5_MAGIC:
        raise ShardFormatError("it does not start with a shardpack header")
    if length > MAX_HEADER_BYTES:
        raise ShardFormatError(f"a header of {length:,} bytes")
    header = block[HDF5_PREFIX.size : HDF5_PREFIX.size + length]
    if len(header) < length:
        header = read(length, HDF5_PREFIX.size)
    if google_crc32c.value(header) != crc:
        raise ShardFormatError("the header does not match its checksum")
    return header
