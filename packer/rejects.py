"""The bound on rejects: past it a run fails."""

from __future__ import annotations

import os
from typing import Any

from readers.layout import REJECTS_NAME

from .errors import TooManyRejectsError

__all__ = ["RejectLimit", "describe"]


class RejectLimit:
    """Counts rejects, shard by shard, against the bound.

    Args:
        allowed: How many there may be.
        found: Candidates in all, for the message.
        out: The output folder, for the message.
    """

    def __init__(self, allowed: int, found: int, out: str) -> None:
        self._allowed = allowed
        self._found = found
        self._out = out
        self._count = 0
        self._first = ""

    def count(self, receipt: dict[str, Any]) -> None:
        """Take in a shard's rejects."""
        self._count += len(receipt["rejects"])
        if receipt["rejects"] and not self._first:
            self._first = describe(receipt["rejects"][0])

    def check(self) -> None:
        """Raise if there are too many.

        Raises:
            TooManyRejectsError: Says how many, names the first and what to do.
        """
        if self._count <= self._allowed:
            return
        raise TooManyRejectsError(
            f"{self._count:,} of {self._found:,} images rejected so far, more than the {self._allowed:,} that "
            f"--max-rejects allows; first {self._first}. See {os.path.join(self._out, REJECTS_NAME)!r}; mend the files "
            "and start again with --overwrite, or rerun with a larger --max-rejects to continue"
        )


def describe(reject: dict[str, Any]) -> str:
    """A line of ``rejects.jsonl`` in words."""
    return f"{reject['key']!r}: {reject['reason']} ({reject['detail']})"
