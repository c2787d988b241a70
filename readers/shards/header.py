"""The header every shard carries, whatever its container, and the bounds that follow from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ManifestError
from ..layout import FIELDS, FORMAT, ROW_BYTES, row_layout
from ..manifest import check_requirements

__all__ = ["MAX_HEADER_BYTES", "Geometry", "Locate", "Read", "ShardFormatError", "extent", "parse_header"]

MAX_HEADER_BYTES: Final = 1 << 20

#: ``read(length, offset) -> bytes``, as ``os.pread`` on the shard's descriptor.
Read = Callable[[int, int], bytes]


class ShardFormatError(ValueError):
    """The file is no shard of its container, or is damaged; the message says what was found."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where things lie in a shard's file, in bytes; every number checked against the file's size.

    Attributes:
        shard_id: BLAKE3-128 of the index rows, as the header has it.
        records: Rows of the index.
        index_blocks: Offset of each block of index rows.
        block_rows: Rows of a full block; the last may hold fewer.
        values_offset: Where a value's offset in the index counts from.
        values_bytes: Length of the part that holds the values, from there.
    """

    shard_id: str
    records: int
    index_blocks: tuple[int, ...]
    block_rows: int
    values_offset: int
    values_bytes: int


Locate = Callable[[Read, int], Geometry]


def parse_header(data: bytes, container: str) -> Mapping[str, Any]:
    """Parse and check the header's JSON.

    Raises:
        ShardFormatError: Not a header of this format, version or container.
    """
    try:
        header = json.loads(data)
        if not isinstance(header, dict) or header["format"] != FORMAT or header["container"] != container:
            raise ShardFormatError(f"the header is not one of a shardpack {container} shard")
        check_requirements(header["requires"], header["version"], "header")
        _check_layout(header)
    except (ManifestError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ShardFormatError):
            raise
        raise ShardFormatError(f"the header is damaged ({type(error).__name__}: {error})") from error
    return header


def _check_layout(header: Mapping[str, Any]) -> None:
    if header["row_bytes"] != ROW_BYTES or header["row"] != row_layout():
        raise ShardFormatError("the index rows have a layout unknown to this reader. Upgrade shardpack")
    fields = header["fields"]
    if not isinstance(fields, dict) or any(fields.get(name) != kind for name, kind in FIELDS.items()):
        raise ShardFormatError("the fields are not those of format version 1")
    if not isinstance(header["shard_id"], str):
        raise ShardFormatError("shard_id is no text")


def extent(header: Mapping[str, Any], member: str, file_bytes: int) -> tuple[int, int]:
    """(offset, size) of a part that the header names, checked to lie in the file."""
    part = header.get(member)
    if not isinstance(part, dict):
        raise ShardFormatError(f"the header has no {member!r}")
    return natural(part, "offset", file_bytes), natural(part, "size", file_bytes - part["offset"])


def natural(members: Mapping[str, Any], name: str, most: int) -> int:
    """An integer member in ``[0, most]``."""
    number = members.get(name)
    if type(number) is not int or not 0 <= number <= most:
        raise ShardFormatError(f"{name} {str(number)[:40]} in the header does not fit the file")
    return number
