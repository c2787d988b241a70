"""`PackOptions`: everything that steers a run, checked when it is made."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from readers.layout import CONTAINERS
from readers.system import usable_cores

from .errors import PackUsageError

__all__ = ["CHECKS", "LABELS", "PackOptions", "parse_size"]

CHECKS: Final = ("decode", "header", "none")
LABELS: Final = ("auto", "folders", "none")
# At most 20 digits and two of exponent: more would only be slow to refuse.
_SIZE: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?(?:e\d{1,2})?)\s*(?:([kmgt])(i?b)?|b?)", re.IGNORECASE)
_MOST_BYTES: Final = 2**63 - 1
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: str | int, name: str = "size") -> int:
    """A size in bytes: ``1000000``, ``1e9``, ``256MiB``, ``2G`` (binary, as MiB), ``500MB`` (decimal).

    Raises:
        PackUsageError: Not a positive whole number of bytes.
    """
    size = Fraction(value) if type(value) is int else _size_of(str(value).strip())
    if size is None or size.denominator != 1 or not 1 <= size <= _MOST_BYTES:
        raise PackUsageError(f"{name} must be a whole number of bytes, such as 256MiB, 2G or 1e9, got {_short(value)}")
    return int(size)


def _size_of(text: str) -> Fraction | None:
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, power, suffix = match.groups(default="")
    unit: int = (1000 if suffix.lower() == "b" else 1024) ** _POWERS[power.lower()]
    return Fraction(number) * unit


def _short(value: object) -> str:
    """A value for a message, at most 60 characters."""
    return repr(value[:40] if isinstance(value, str) else value)[:60]


def _parse_max_rejects(value: str | int) -> tuple[int | None, Fraction | None]:
    """(count, None) or (None, share)."""
    text = str(value).strip()
    if re.fullmatch(r"\d{1,18}", text):
        return int(text), None
    if re.fullmatch(r"\d{1,3}(\.\d{1,18})?%", text) and Fraction(text[:-1]) <= 100:
        return None, Fraction(text[:-1]) / 100
    raise PackUsageError(f"max-rejects must be a count such as 20 or a share such as 1%, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """How to pack.

    Attributes:
        format: Container, "hdf5" or "lmdb".
        shard_size: Bytes of images and keys that a shard takes (int, or text such as "256MiB"); a larger
            image gets a shard of its own.
        shard_records: Fill shards by this count instead; saves one ``stat`` a file while scanning.
        workers: Processes that pack; None: the cores this process may use.
        check: "decode" proves every image by decoding it, "header" opens it, "none" looks at its first bytes.
        max_rejects: How many files may be rejected before the run fails: a count, or a share such as "1%".
        max_pixels: Reject images with more pixels; None: Pillow's own limit (178,956,970).
        class_map: A packed set, or a text file with one class name a line: labels follow it.
        shuffle: Seed of a stored random order; None: ImageFolder's order.
        labels: "folders": the first folder level names the class; "none": no labels, all folders are walked;
            "auto": "folders" if there are folders.
        all_files: Look at files without an image extension too.
        overwrite: Start again, even if OUT holds a packed set.

    Raises:
        PackUsageError: A value makes no sense (also a ValueError).
    """

    format: str = "hdf5"
    shard_size: str | int = "256MiB"
    shard_records: int | None = None
    workers: int | None = None
    check: str = "decode"
    max_rejects: str | int = "1%"
    max_pixels: int | None = None
    class_map: str | os.PathLike[str] | None = None
    shuffle: int | None = None
    labels: str = "auto"
    all_files: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        _check_choice("format", self.format, tuple(CONTAINERS))
        _check_choice("check", self.check, CHECKS)
        _check_choice("labels", self.labels, LABELS)
        parse_size(self.shard_size, "shard-size")
        _parse_max_rejects(self.max_rejects)
        for name in ("shard_records", "workers", "max_pixels"):
            _check_at_least(name, getattr(self, name), 1)
        _check_at_least("shuffle", self.shuffle, 0)
        if self.class_map is not None and self.labels == "none":
            raise PackUsageError("class-map gives labels and labels=none takes none: use one of them")

    @property
    def shard_bytes(self) -> int:
        """``shard_size`` in bytes."""
        return parse_size(self.shard_size)

    @property
    def worker_count(self) -> int:
        """``workers``, or the cores that this process may use."""
        return usable_cores() if self.workers is None else self.workers

    def rejects_allowed(self, found: int) -> int:
        """How many of ``found`` files may be rejected."""
        count, share = _parse_max_rejects(self.max_rejects)
        return count if share is None else int(found * share)  # type: ignore[return-value]

    def content(self) -> dict[str, Any]:
        """The options that change what is stored, as the manifest records them."""
        by_count = self.shard_records is not None
        return {
            "shard_bytes": None if by_count else self.shard_bytes,
            "shard_records": self.shard_records,
            "check": self.check,
            "max_pixels": self.max_pixels,
            "shuffle": self.shuffle,
            "labels": self.labels,
            "all_files": self.all_files,
        }


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PackUsageError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _check_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise PackUsageError(f"{name.replace('_', '-')} must be a whole number, at least {least}, got {value!r}")
