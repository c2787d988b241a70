"""The on-disk contract, format version 1: every name, number and byte that packer and readers share.

A packed set is a folder::

    manifest.json               written last; a folder without it is no finished set
    shards/0000/0000000.h5      or .lmdb; the shard's number in 7 digits, folder = number // 1000
    rejects.jsonl               only if something was rejected

A shard holds *values* (one after the other, bytes as they were), an *index* (one row of
`ROW_BYTES` a record) and a *header* (JSON). Where they lie depends on the container
(``readers/shards``); what they say is here. All integers are little-endian.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from blake3 import blake3

__all__ = [
    "CONTAINERS",
    "FIELDS",
    "FLAGS",
    "FORMAT",
    "FORMAT_CODES",
    "FORMAT_NAMES",
    "HDF5_MAGIC",
    "HDF5_PREFIX",
    "INDEX_DTYPE",
    "MANIFEST_NAME",
    "MAX_VALUE_BYTES",
    "MODE_CODES",
    "MODE_NAMES",
    "NO_LABEL",
    "REJECTS_NAME",
    "ROW",
    "ROW_BYTES",
    "SHARDS_NAME",
    "VERSION",
    "canonical_json",
    "counted",
    "digest",
    "key_from_json",
    "key_to_json",
    "key_to_str",
    "order_key",
    "row_layout",
    "shard_name",
    "shuffle_key",
]

FORMAT: Final = "shardpack"
VERSION: Final = 1

MANIFEST_NAME: Final = "manifest.json"
REJECTS_NAME: Final = "rejects.jsonl"
SHARDS_NAME: Final = "shards"
CONTAINERS: Final[Mapping[str, str]] = {"hdf5": ".h5", "lmdb": ".lmdb"}

#: Fields of a record: name -> kind. "bytes" has variable length, all others are fixed columns.
FIELDS: Final[Mapping[str, str]] = {
    "image": "bytes",
    "key": "bytes",
    "label": "i64",
    "width": "u32",
    "height": "u32",
    "format": "u8",
    "mode": "u8",
    "orientation": "u8",
    "flags": "u16",
}

#: Longest value: lengths are u32.
MAX_VALUE_BYTES: Final = 2**32 - 1
#: ``label`` of a record in a set without classes.
NO_LABEL: Final = -1

# One index row, laid out as a C compiler would (natural alignment, padding bytes zero): 56 bytes.
INDEX_DTYPE: Final = np.dtype(
    [
        ("image_offset", "<u8"),
        ("image_length", "<u4"),
        ("image_crc32c", "<u4"),
        ("key_offset", "<u8"),
        ("key_length", "<u4"),
        ("key_crc32c", "<u4"),
        ("label", "<i8"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("format", "u1"),
        ("mode", "u1"),
        ("orientation", "u1"),
        ("flags", "<u2"),
    ],
    align=True,
)
ROW_BYTES: Final = INDEX_DTYPE.itemsize
#: The same row for ``struct``: unpacks to the fields in the order of `INDEX_DTYPE`.
ROW: Final = struct.Struct("<QIIQIIqIIBBBxH2x")

#: An HDF5 shard starts (in HDF5's user block) with: magic, header length u32, CRC-32C of the header u32.
HDF5_MAGIC: Final = b"\x89SHPACK\n"
HDF5_PREFIX: Final = struct.Struct("<8sII")

# Codes of the u8 columns ``format`` and ``mode``: 0 says "not looked at" (packed with --check none).
FORMAT_CODES: Final[Mapping[str, int]] = {
    "JPEG": 1, "PNG": 2, "WEBP": 3, "GIF": 4, "BMP": 5, "TIFF": 6, "PPM": 7, "JPEG2000": 8, "AVIF": 9,
    "MPO": 10,
}  # fmt: skip
MODE_CODES: Final[Mapping[str, int]] = {
    "1": 1, "L": 2, "LA": 3, "La": 4, "P": 5, "PA": 6, "RGB": 7, "RGBA": 8, "RGBa": 9, "RGBX": 10,
    "CMYK": 11, "YCbCr": 12, "LAB": 13, "HSV": 14, "I": 15, "F": 16, "I;16": 17, "I;16B": 18,
    "I;16L": 19, "I;16N": 20, "other": 255,
}  # fmt: skip
FORMAT_NAMES: Final[Mapping[int, str]] = {code: name for name, code in FORMAT_CODES.items()}
MODE_NAMES: Final[Mapping[int, str]] = {code: name for name, code in MODE_CODES.items()}

#: Bits of the u16 column ``flags``: name -> bit.
FLAGS: Final[Mapping[str, int]] = {
    "animated": 1 << 0,  # more than one frame or page; the first one is the sample
    "alpha": 1 << 1,  # an alpha channel, or a transparent colour
    "16-bit": 1 << 2,  # more than 8 bits a channel
    "cmyk": 1 << 3,
    "icc": 1 << 4,  # carries a colour profile
    "bad-metadata": 1 << 5,  # EXIF or the like is broken; the pixels are not
    "large": 1 << 6,  # past Pillow's warning limit of 89,478,485 pixels
}


def shard_name(number: int, container: str) -> str:
    """Path of a shard relative to the set, "/" separators: ``shards/0001/0001234.h5`` for 1234."""
    return f"{SHARDS_NAME}/{number // 1000:04d}/{number:07d}{CONTAINERS[container]}"


def row_layout() -> list[list[Any]]:
    """How a header describes an index row: [name, numpy type, byte offset] a column."""
    fields = INDEX_DTYPE.fields
    assert fields is not None
    return [[name, fields[name][0].str, fields[name][1]] for name in INDEX_DTYPE.names or ()]


def canonical_json(value: object, *, indent: int | None = None) -> bytes:
    """JSON in the one spelling this format writes: ASCII, keys in the order given, one newline at the end.

    A lone surrogate (a key's byte that is not UTF-8) becomes its ``\\udcxx`` escape.
    """
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, ensure_ascii=True, indent=indent, separators=separators).encode() + b"\n"


def digest(*parts: bytes | bytearray | memoryview) -> str:
    """BLAKE3 with 128 bits of output, 32 hex digits: what ``shard_id`` and ``set_id`` are made with."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest(length=16)


def counted(number: int, one: str, many: str = "") -> str:
    """``1 shard``, ``12,000 shards``: a number and its noun, for messages."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def key_to_str(key: bytes) -> str:
    """A key for people and JSON: bytes that are not UTF-8 become lone surrogates, as ``os.fsdecode`` does."""
    return key.decode("utf-8", "surrogateescape")


def key_to_json(key: bytes) -> dict[str, str]:
    """``{"key": ...}``, and ``key_hex`` beside it where the key is not UTF-8 (so any language can read it)."""
    text = key_to_str(key)
    return {"key": text} if _is_utf8(key) else {"key": text, "key_hex": key.hex()}


def key_from_json(member: Mapping[str, Any]) -> bytes:
    """Inverse of `key_to_json`."""
    if "key_hex" in member:
        return bytes.fromhex(member["key_hex"])
    return str(member["key"]).encode("utf-8", "surrogateescape")


def _is_utf8(key: bytes) -> bool:
    try:
        key.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def order_key(key: bytes, *, labelled: bool) -> tuple[str, str, str]:
    """Sort key of ``torchvision.datasets.ImageFolder``'s record order.

    Classes by name, in each the folders by their whole path as text, in each folder the files by name:
    that is ``sorted(os.walk(class_folder))``. "a-b/x" comes before "a/b", since "-" < "/".
    A set without classes is one class whose folder is the source itself.
    """
    text = key_to_str(key)
    folder, _, name = text.rpartition("/")
    return (text.partition("/")[0] if labelled else "", folder, name)


def shuffle_key(key: bytes, seed: int) -> bytes:
    """Sort key of a set packed with ``--shuffle SEED``: BLAKE3-128 of ``"SEED/" + key``; ties by key."""
    return blake3(os.fsencode(f"{seed}/") + key).digest(length=16)
