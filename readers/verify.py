"""Is every byte still what was packed?"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from blake3 import blake3

from .errors import RecordCorruptError, ShardCorruptError, ShardNotFoundError
from .handles import Shard, open_shard
from .layout import counted, key_to_json, key_to_str
from .manifest import Manifest

__all__ = ["Damage", "VerifyReport", "verify"]

_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it was packed.

    Attributes:
        shard: The shard's number.
        path: Its file.
        what: What is wrong.
        position: The record's place in the shard, None where the damage is not in a record's values.
        key: The record's key, None where it cannot be read.
    """

    shard: int
    path: str
    what: str
    position: int | None = None
    key: bytes | None = None

    def __str__(self) -> str:
        record = "" if self.position is None else f", record {self.position}"
        key = "" if self.key is None else f" (key {key_to_str(self.key)!r})"
        return f"shard {self.shard} ({self.path}){record}{key}: {self.what}"

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        key = {} if self.key is None else key_to_json(self.key)
        return {"shard": self.shard, "path": self.path, "position": self.position, **key, "what": self.what}


@dataclass
class VerifyReport:
    """What was verified and what is damaged.

    Attributes:
        root: The set.
        shards, records, bytes: How much was read.
        damages: Everything found, in the order of the files.
    """

    root: str
    shards: int = 0
    records: int = 0
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing is damaged."""
        return not self.damages

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "root": self.root,
            "ok": self.ok,
            "shards": self.shards,
            "records": self.records,
            "bytes": self.bytes,
            "damages": [damage.to_dict() for damage in self.damages],
        }

    def lines(self) -> list[str]:
        """For people."""
        read = f"{counted(self.shards, 'shard')}, {counted(self.records, 'record')}, {self.bytes / 2**20:,.1f} MiB"
        if self.ok:
            return [f"{self.root}: every byte is as packed ({read})"]
        return [*map(str, self.damages), f"{self.root}: {counted(len(self.damages), 'damage')} found ({read})"]


def verify(root: str | os.PathLike[str], advance: Callable[[int], object] = lambda size: None) -> VerifyReport:
    """Read a whole set: BLAKE3 of every shard, CRC-32C of every value, index against ``shard_id``.

    Args:
        root: The set.
        advance: Called with the bytes hashed since the last call.

    Returns:
        A report; damage is listed there, not raised.

    Raises:
        UnfinishedSetError, ManifestError: There is nothing to verify against.
    """
    path = os.fspath(root)
    manifest = Manifest.load(path)
    report = VerifyReport(path)
    for number in range(len(manifest.shard_ids)):
        _verify_shard(path, manifest, number, report, advance)
    return report


def _verify_shard(
    root: str, manifest: Manifest, number: int, report: VerifyReport, advance: Callable[[int], object]
) -> None:
    path = manifest.shard_path(root, number)
    report.shards += 1
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for ever
        report.damages.append(Damage(number, path, "not a file"))
        return
    try:
        size, found = _hash(path, advance)
    except FileNotFoundError:
        report.damages.append(Damage(number, path, "the file is missing"))
        return
    except OSError as error:
        report.damages.append(Damage(number, path, f"cannot be read: {error.strerror}"))
        return
    report.bytes += size
    before = len(report.damages)
    try:
        _verify_records(open_shard(root, manifest, number), number, report)
    except (ShardCorruptError, ShardNotFoundError, OSError) as error:
        report.damages.append(Damage(number, path, str(error).removeprefix(f"{path}: ")))
    if found != manifest.shard_blake3s[number] and len(report.damages) == before:
        # All values and the index are good: the flipped byte is in the container's own structure or in padding.
        report.damages.append(Damage(number, path, "the file does not match its BLAKE3; no record is affected"))


def _verify_records(shard: Shard, number: int, report: VerifyReport) -> None:
    for position in range(shard.records):
        report.records += 1
        for read in (shard.image, shard.key):
            try:
                read(position)
            except RecordCorruptError as error:
                what = str(error).partition(": the ")[2].partition(". Run")[0]
                report.damages.append(Damage(number, shard.path, f"the {what}", position, error.key))


def _hash(path: str, advance: Callable[[int], object]) -> tuple[int, str]:
    """(size, BLAKE3) of a file, read in pieces: mapping it would count as this process's memory."""
    hasher, size, buffer = blake3(), 0, bytearray(_READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        while length := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:length])
            size += length
            advance(length)
    return size, hasher.hexdigest()
