"""What the stages of packing hand to each other."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from readers.layout import key_to_json

__all__ = ["REASONS", "UNKNOWN", "Record", "Reject", "SourceImage"]

#: ``size`` and ``mtime_ns`` of a file that the scan did not ``stat``.
UNKNOWN: Final = -1

#: Why a file can be rejected: reason -> the stage that finds it.
REASONS: Final = {
    "missing": "read",  # gone since the scan, or a link to nothing
    "permission": "read",
    "unreadable": "read",
    "not-a-file": "read",  # a pipe, a socket, a device
    "changed": "read",  # another size than the scan saw
    "too-large": "read",  # more than 4 GiB
    "empty": "identify",
    "not-an-image": "identify",  # the first bytes are of no format on the list
    "unsupported": "identify",  # they are, but Pillow cannot open it
    "truncated": "check",
    "damaged": "check",
    "too-many-pixels": "check",
}


class SourceImage(NamedTuple):
    """A candidate, as the scan saw it.

    ``key`` is its path below the source, "/" separators, as bytes; ``label`` its class or
    `layout.NO_LABEL`; ``size`` in bytes and ``mtime_ns``, or `UNKNOWN`.
    """

    key: bytes
    label: int
    size: int
    mtime_ns: int


class Record(NamedTuple):
    """One sample as it will be stored; the columns are those of `layout.INDEX_DTYPE`."""

    image: bytes
    key: bytes
    label: int
    width: int
    height: int
    format: int
    mode: int
    orientation: int
    flags: int


class Reject(NamedTuple):
    """A file that was found but cannot be packed."""

    key: bytes
    reason: str
    detail: str

    def to_json(self) -> dict[str, Any]:
        """A line of ``rejects.jsonl``."""
        return {
            **key_to_json(self.key),
            "stage": REASONS[self.reason],
            "reason": self.reason,
            "detail": self.detail,
        }
