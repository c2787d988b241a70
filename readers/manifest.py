"""``manifest.json``: what a packed set holds, and where sample ``i`` lies."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from .errors import ManifestError, ShardCorruptError, ShardNotFoundError, UnfinishedSetError
from .layout import (
    CONTAINERS,
    FIELDS,
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    canonical_json,
    digest,
    shard_name,
)

__all__ = ["MAX_MANIFEST_BYTES", "Manifest"]

MAX_MANIFEST_BYTES: Final = 100_000_000
_MAX_SHARDS: Final = 5_000_000
_MAX_NUMBER: Final = 2**63 - 1
#: What a reader must know to read a set; a set that requires anything else is refused.
_KNOWN_REQUIREMENTS: Final = frozenset[str]()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A validated manifest.

    Attributes:
        container: "hdf5" or "lmdb".
        classes: Class names in label order, or None for a set without labels.
        class_counts: Records of each class, as long as ``classes``.
        records: Records in the set.
        rejected: Files that were found but not packed; ``rejects.jsonl`` names them.
        options: The packing options that change content.
        source: ``found``, and the digest of the listing that was packed.
        created_by: Name and version of the program that packed.
        shard_records, shard_bytes, shard_ids, shard_blake3s: One entry a shard: its records, its file's
            size in bytes, BLAKE3-128 of its index, BLAKE3-256 of its file.
    """

    container: str
    classes: tuple[str, ...] | None
    class_counts: tuple[int, ...] | None
    records: int
    rejected: int
    options: Mapping[str, Any]
    source: Mapping[str, Any]
    created_by: str
    shard_records: tuple[int, ...]
    shard_bytes: tuple[int, ...]
    shard_ids: tuple[str, ...]
    shard_blake3s: tuple[str, ...]
    _ends: list[int] = field(init=False, repr=False, compare=False)
    _starts: list[int] = field(init=False, repr=False, compare=False)
    _end_array: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", list(accumulate(self.shard_records)))
        object.__setattr__(self, "_starts", [0, *self._ends[:-1]])
        object.__setattr__(self, "_end_array", np.array(self._ends, np.int64))

    @property
    def set_id(self) -> str:
        """Identity of the packed content: a digest of the shard columns, 32 hex digits."""
        return digest(canonical_json(self._columns()))

    def _columns(self) -> dict[str, Any]:
        return {
            "records": self.shard_records,
            "bytes": self.shard_bytes,
            "shard_id": self.shard_ids,
            "blake3": self.shard_blake3s,
        }

    def locate(self, index: int) -> tuple[int, int]:
        """(shard number, position in the shard) of a sample index in ``[0, records)``."""
        number = bisect_right(self._ends, index)
        return number, index - self._starts[number]

    def locate_sorted(self, indices: npt.NDArray[np.int64]) -> Iterator[tuple[int, slice, npt.NDArray[np.int64]]]:
        """Group ascending sample indices by shard.

        Yields:
            (shard number, which of ``indices`` lie in it, their positions there).
        """
        numbers = np.searchsorted(self._end_array, indices, "right")
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(indices)]
        for start, stop in pairwise(edges if len(indices) else []):
            number = int(numbers[start])
            yield number, slice(start, stop), indices[start:stop] - self.first_index(number)

    def first_index(self, number: int) -> int:
        """Sample index of a shard's first record."""
        return self._starts[number]

    def shard_path(self, root: str, number: int) -> str:
        """Path of a shard's file below ``root``; names follow from the number, never from the manifest."""
        return os.path.join(root, *shard_name(number, self.container).split("/"))

    def to_bytes(self) -> bytes:
        """The file's content: canonical, one member a line."""
        members = {
            "format": FORMAT,
            "version": VERSION,
            "requires": [],
            "container": self.container,
            "fields": dict(FIELDS),
            "classes": self.classes,
            "class_counts": self.class_counts,
            "records": self.records,
            "rejected": self.rejected,
            "options": self.options,
            "source": self.source,
            "created_by": self.created_by,
            "set_id": self.set_id,
            "shards": self._columns(),
        }
        lines = (json.dumps(name).encode() + b":" + canonical_json(v).strip() for name, v in members.items())
        return b"{\n" + b",\n".join(lines) + b"\n}\n"

    @classmethod
    def load(cls, root: str | os.PathLike[str]) -> Manifest:
        """Read and validate ``root/manifest.json``.

        Raises:
            UnfinishedSetError: There is no manifest (also a FileNotFoundError).
            ManifestError: It is damaged, too large, or needs a newer reader (also a ValueError).
        """
        path = os.path.join(os.fspath(root), MANIFEST_NAME)
        return cls.from_bytes(_read_manifest(path), path)

    @classmethod
    def from_bytes(cls, data: bytes, path: str = MANIFEST_NAME) -> Manifest:
        """Validate a manifest's bytes; ``path`` is named in errors."""
        members = _Members(_parse(data, path), path)
        _check_version(members)
        shards = _Members(members.mapping("shards"), path, "shards.")
        if sum(shards.counts("records")) != members.count("records"):
            raise ManifestError(f"{path}: damaged: the records of the shards do not add up to those of the set")
        classes = members.optional_strings("classes")
        manifest = cls(
            container=members.choice("container", CONTAINERS),
            classes=classes,
            class_counts=None if classes is None else members.counts("class_counts", len(classes)),
            records=members.count("records"),
            rejected=members.count("rejected"),
            options=members.mapping("options"),
            source=members.mapping("source"),
            created_by=members.string("created_by"),
            shard_records=shards.counts("records"),
            shard_bytes=shards.counts("bytes"),
            shard_ids=shards.hex_strings("shard_id", 32),
            shard_blake3s=shards.hex_strings("blake3", 64),
        )
        _check_sums(manifest, members)
        return manifest

    def check_files(self, root: str) -> None:
        """Compare every shard file's size with the manifest: one ``stat`` a shard, nothing is opened.

        Raises:
            ShardNotFoundError, ShardCorruptError: The first shard that is missing or of another size.
        """
        for number, expected in enumerate(self.shard_bytes):
            path = self.shard_path(root, number)
            try:
                found = os.stat(path).st_size
            except FileNotFoundError:
                raise ShardNotFoundError(missing_shard(path, number, len(self.shard_bytes))) from None
            if found != expected:
                raise ShardCorruptError(
                    f"{path}: {found:,} bytes, but the manifest says {expected:,}: "
                    "the copy is incomplete or the file was changed. Copy it again or repack the set"
                )


def missing_shard(path: str, number: int, shards: int) -> str:
    """The one message for a shard that is not there."""
    return f"{path}: shard {number} of {shards} is missing. Copy it again or repack the set"


def _read_manifest(path: str) -> bytes:
    root = os.path.dirname(path)
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for ever
        raise ManifestError(f"{path}: not a file")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise UnfinishedSetError(_why_unfinished(root)) from None
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{path}: larger than {MAX_MANIFEST_BYTES:,} bytes; this is no shardpack manifest")
    return data


def _why_unfinished(root: str) -> str:
    if os.path.isdir(os.path.join(root, ".pack")):
        return f"{root}: packing has not finished (no {MANIFEST_NAME} yet). Run the same pack command again to continue"
    if os.path.isdir(root):
        return (
            f"{root}: no {MANIFEST_NAME} here, so this is not a finished packed set. Give the folder that `pack` wrote"
        )
    what = "a file, not a folder" if os.path.exists(root) else "no such folder"
    return f"{root}: {what}. Give the folder that `pack` wrote"


def _parse(data: bytes, path: str) -> dict[str, Any]:
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: damaged: not the JSON that pack writes ({error})") from error
    if not isinstance(value, dict):
        raise ManifestError(f"{path}: damaged: expected a JSON object, found {type(value).__name__}")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member appears twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a number")
    return number


def check_requirements(requires: Iterable[str], version: int, where: str) -> None:
    """Refuse what this reader does not know.

    Raises:
        ManifestError: Another format version, or a requirement unknown here.
    """
    if version != VERSION:
        raise ManifestError(
            f"{where}: format version {version}; this reader knows {VERSION}. Upgrade shardpack or repack"
        )
    unknown = sorted(set(requires) - _KNOWN_REQUIREMENTS)
    if unknown:
        raise ManifestError(f"{where}: needs {unknown[0][:40]!r}, unknown to this reader. Upgrade shardpack")


def _check_version(members: _Members) -> None:
    if members.optional("format") != FORMAT:
        raise ManifestError(f"{members.path}: not the manifest of a packed set (its format is not {FORMAT!r})")
    check_requirements(members.strings("requires"), members.count("version"), members.path)
    fields = members.mapping("fields")
    missing = [name for name, kind in FIELDS.items() if fields.get(name) != kind]
    if missing:
        raise ManifestError(f"{members.path}: field {missing[0]!r} is missing or of another kind")


def _check_sums(manifest: Manifest, members: _Members) -> None:
    columns = (manifest.shard_records, manifest.shard_bytes, manifest.shard_ids, manifest.shard_blake3s)
    if len({len(column) for column in columns}) != 1:
        raise ManifestError(f"{members.path}: damaged: the shard columns differ in length")
    if manifest.class_counts is not None and sum(manifest.class_counts) != manifest.records:
        raise ManifestError(f"{members.path}: damaged: class_counts do not add up to records")
    if manifest.classes is not None and len(set(manifest.classes)) != len(manifest.classes):
        raise ManifestError(f"{members.path}: damaged: a class name appears twice")
    if members.string("set_id") != manifest.set_id:
        raise ManifestError(f"{members.path}: damaged: set_id does not match the shard columns")


class _Members:
    """Typed access to a JSON object's members, with errors that say where and what."""

    def __init__(self, members: Mapping[str, Any], path: str, prefix: str = "") -> None:
        self._members = members
        self._prefix = prefix
        self.path = path

    def value(self, name: str, kind: type | tuple[type, ...]) -> Any:
        if name not in self._members:
            raise ManifestError(f"{self.path}: damaged: member {self._prefix + name!r} is missing")
        value = self._members[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            self._bad(name, value)
        return value

    def _bad(self, name: str, value: object) -> NoReturn:
        raise ManifestError(f"{self.path}: damaged: member {self._prefix + name!r} is {str(value)[:40]!r}")

    def optional(self, name: str) -> Any:
        return self._members.get(name)

    def string(self, name: str) -> str:
        text: str = self.value(name, str)
        return text

    def choice(self, name: str, allowed: Iterable[str]) -> str:
        text = self.string(name)
        if text not in allowed:
            raise ManifestError(f"{self.path}: {name} {text[:40]!r}; this reader knows {', '.join(allowed)}")
        return text

    def mapping(self, name: str) -> dict[str, Any]:
        members: dict[str, Any] = self.value(name, dict)
        return members

    def count(self, name: str) -> int:
        number: int = self.value(name, int)
        if not 0 <= number <= _MAX_NUMBER:
            self._bad(name, number)
        return number

    def strings(self, name: str) -> tuple[str, ...]:
        items = self.value(name, list)
        if not all(isinstance(item, str) for item in items):
            self._bad(name, items)
        return tuple(items)

    def optional_strings(self, name: str) -> tuple[str, ...] | None:
        return None if name in self._members and self._members[name] is None else self.strings(name)

    def counts(self, name: str, length: int | None = None) -> tuple[int, ...]:
        items = self.value(name, list)
        if len(items) > _MAX_SHARDS or (length is not None and len(items) != length):
            raise ManifestError(f"{self.path}: damaged: {self._prefix + name} has {len(items):,} entries")
        if not all(type(item) is int and 0 <= item <= _MAX_NUMBER for item in items):
            self._bad(name, items)
        return tuple(items)

    def hex_strings(self, name: str, digits: int) -> tuple[str, ...]:
        items = self.strings(name)
        if not all(len(item) == digits and set(item) <= set("0123456789abcdef") for item in items):
            self._bad(name, items)
        return items
