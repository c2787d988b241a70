"""What ends a packing run, each with the exit status of the command."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["PackError", "PackUsageError", "PlanDiffersError", "TooManyRejectsError"]


class PackError(Exception):
    """The run cannot go on; the message is one line that says what to do."""

    exit_status: ClassVar[int] = 1


class PackUsageError(PackError, ValueError):
    """Paths or options do not make sense together; nothing was written."""

    exit_status: ClassVar[int] = 2


class TooManyRejectsError(PackError):
    """More files were rejected than ``--max-rejects`` allows."""


class PlanDiffersError(PackError):
    """The source or the options are not those that the set in the output folder was begun with."""
