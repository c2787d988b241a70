"""What the writers share: the index of a shard while it is being written, and the header."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import Any, Final, NamedTuple

import google_crc32c

from readers.layout import FIELDS, FORMAT, ROW, ROW_BYTES, VERSION, digest, row_layout

from ..items import Record
from ..publish import PrivateFile

__all__ = ["BLOCK_ROWS", "IndexRows", "ShardWriter", "header"]

#: Rows of an index block: at most 1 MiB.
BLOCK_ROWS: Final = (1 << 20) // ROW_BYTES

_OFFSETS: Final = (struct.Struct("<Q"), 0, 16)  # where a row holds the offsets of image and key


class Finished(NamedTuple):
    """A completed shard: its id, its records, the bytes of their images and keys."""

    shard_id: str
    records: int
    payload_bytes: int


class ShardWriter(ABC):
    """Writes one shard into a private file.

    Args:
        private: The file; the writer neither flushes it to disk nor publishes it.
    """

    @abstractmethod
    def __init__(self, private: PrivateFile) -> None: ...

    @abstractmethod
    def add(self, record: Record) -> None:
        """Append a record."""

    @abstractmethod
    def finish(self) -> Finished:
        """Complete the file: index and header."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of the file without completing it."""


class IndexRows:
    """Index rows in blocks of at most 1 MiB, so that growing never copies what is there."""

    def __init__(self) -> None:
        self.blocks: list[bytearray] = []
        self.count = 0
        self.payload_bytes = 0

    def add(self, record: Record, image_offset: int, key_offset: int) -> None:
        """Append the row of a record whose values lie at these offsets."""
        if self.count % BLOCK_ROWS == 0:
            self.blocks.append(bytearray())
        self.blocks[-1] += ROW.pack(
            image_offset, len(record.image), google_crc32c.value(record.image),
            key_offset, len(record.key), google_crc32c.value(record.key),
            record.label, record.width, record.height, record.format, record.mode, record.orientation,
            record.flags,
        )  # fmt: skip
        self.count += 1
        self.payload_bytes += len(record.image) + len(record.key)

    def set_offset(self, position: int, field: str, offset: int) -> None:
        """Fill in where a value of the record at ``position`` has come to lie."""
        packer, image_at, key_at = _OFFSETS
        block, row = divmod(position, BLOCK_ROWS)
        packer.pack_into(self.blocks[block], row * ROW_BYTES + (image_at if field == "image" else key_at), offset)

    def finished(self) -> Finished:
        """The shard's summary; ``shard_id`` is BLAKE3-128 of all rows."""
        return Finished(digest(*self.blocks), self.count, self.payload_bytes)


def header(container: str, finished: Finished, **parts: Any) -> dict[str, Any]:
    """A shard's header; ``parts`` say where things lie."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "requires": [],
        "container": container,
        "shard_id": finished.shard_id,
        "records": finished.records,
        "fields": dict(FIELDS),
        "row_bytes": ROW_BYTES,
        "row": row_layout(),
        **parts,
    }
