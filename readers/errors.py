"""What can go wrong while reading a packed set, as exception classes.

Each class has a built-in second parent, so that code which knows nothing of shardpack
(``except FileNotFoundError``) still catches what it means to catch.
"""

from __future__ import annotations

__all__ = [
    "ManifestError",
    "ReaderError",
    "RecordCorruptError",
    "RecordDecodeError",
    "ShardCorruptError",
    "ShardNotFoundError",
    "UnfinishedSetError",
]


class ReaderError(Exception):
    """Base of every error that ``readers`` raises on its own account."""


class ManifestError(ReaderError, ValueError):
    """``manifest.json`` is damaged, hostile, or of a version this reader does not know."""


class UnfinishedSetError(ReaderError, FileNotFoundError):
    """The folder holds no ``manifest.json``: packing has not finished, or this is no packed set."""


class ShardNotFoundError(ReaderError, FileNotFoundError):
    """A shard that the manifest names is not there."""


class ShardCorruptError(ReaderError, ValueError):
    """A shard is not the file that the manifest describes."""


class _RecordError(ReaderError, ValueError):
    """An error about one record.

    Attributes:
        shard_path: The shard's file.
        position: The record's place in the shard, from 0.
        key: The record's key, or None where it could not be read.
    """

    def __init__(self, message: str, shard_path: str = "", position: int = -1, key: bytes | None = None) -> None:
        super().__init__(message)
        self.shard_path = shard_path
        self.position = position
        self.key = key

    def __reduce__(self) -> tuple[object, ...]:
        # DataLoader carries a worker's exception to the parent by pickling it.
        return type(self), (str(self), self.shard_path, self.position, self.key)


class RecordCorruptError(_RecordError):
    """Stored bytes do not match their checksum."""


class RecordDecodeError(_RecordError):
    """Stored bytes are intact but could not be decoded."""
