"""The plan and the receipts in ``OUT/.pack``: what lets an interrupted run continue.

The plan is one file a shard, one line a candidate; a receipt says that a shard is published, and what it holds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from readers.layout import canonical_json, key_to_str

from .errors import PlanDiffersError
from .items import SourceImage
from .publish import OutputFolder, read_json

__all__ = ["ListingDigest", "Plan", "Workspace"]

_PLAN: Final = ".pack/plan.json"
_LINES_PER_UPDATE: Final = 256
_ESCAPE: Final = re.compile(rb"\\(.)", re.DOTALL)
Assigned = Iterable[tuple[int, SourceImage]]


@dataclass(frozen=True)
class Plan:
    """What a run will pack.

    Attributes:
        shards: Number of shards.
        found: Candidates in all.
        source_bytes: Sum of their sizes as scanned; 0 where sizes were not looked up.
        listing: BLAKE3 of the listing (see `ListingDigest`).
        facts: What the run must agree with to be continued: options, classes.
        notes: What the scan passed over, for the report.
    """

    shards: int
    found: int
    source_bytes: int
    listing: str
    facts: dict[str, Any]
    notes: dict[str, Any]


class ListingDigest:
    """BLAKE3 of a listing: a line ``key, NUL, size, newline`` a candidate, in packing order."""

    def __init__(self) -> None:
        self._hasher = blake3()
        self._lines: list[bytes] = []

    def add(self, image: SourceImage) -> None:
        """Take in the next candidate."""
        self._lines.append(b"%b\0%d\n" % (image.key, image.size))
        if len(self._lines) >= _LINES_PER_UPDATE:
            self._update()

    def hexdigest(self) -> str:
        """64 hex digits."""
        self._update()
        return self._hasher.hexdigest()

    def _update(self) -> None:
        self._hasher.update(b"".join(self._lines))
        self._lines.clear()


class Workspace:
    """Plan and receipts of the set being packed in ``output``."""

    def __init__(self, output: OutputFolder) -> None:
        self._output = output

    # -- the plan

    def stored_plan(self) -> Plan | None:
        """The plan of an earlier run, if it got as far as a whole plan."""
        stored = read_json(self._output.work_path(_PLAN))
        return Plan(**stored) if isinstance(stored, dict) else None

    def write_plan(self, assigned: Assigned, facts: dict[str, Any], notes: Any) -> Plan:
        """Write the plan, shard by shard as the scan goes; ``notes()`` is asked when it is through."""
        totals = _Totals()
        for number, images in itertools.groupby(assigned, key=lambda pair: pair[0]):
            with self._output.stream(_piece_name(self._output, number)) as file:
                for _, image in images:
                    totals.add(image)
                    file.write(_line(image))
            totals.shards = number + 1
        plan = totals.plan(facts, notes())
        if plan.found:
            self._output.write(_PLAN, canonical_json(plan.__dict__))
        return plan

    def compare_plan(self, assigned: Assigned, stored: Plan, notes: Any) -> Plan:
        """Scan again and compare with the stored plan.

        Raises:
            PlanDiffersError: The source has changed; names the first difference.
        """
        totals = _Totals()
        old_lines = (line for number in range(stored.shards) for line in self._lines(number))
        for pair, old in itertools.zip_longest(assigned, old_lines):
            new = None if pair is None else _line(pair[1])
            if new != old:
                raise PlanDiffersError(
                    _difference(None if pair is None else pair[1], None if old is None else _image(old))
                )
            totals.add(pair[1])
        totals.shards = stored.shards
        return totals.plan(stored.facts, notes())

    def candidates(self, number: int) -> Iterator[SourceImage]:
        """The candidates of a shard, streamed from its piece of the plan."""
        return map(_image, self._lines(number))

    def _lines(self, number: int) -> Iterator[bytes]:
        with open(self._output.work_path(_piece_name(self._output, number)), "rb") as file:
            yield from file

    # -- receipts

    def write_receipt(self, number: int, receipt: dict[str, Any]) -> None:
        """Record that a shard is published."""
        self._output.write(self._output.work_name("receipts", number, ".json"), canonical_json(receipt), replace=True)

    def receipt(self, number: int) -> dict[str, Any] | None:
        """The receipt of a shard, or None."""
        stored = read_json(self._output.work_path(self._output.work_name("receipts", number, ".json")))
        return stored if isinstance(stored, dict) else None


class _Totals:
    """Counts and digest of a listing while it streams by."""

    def __init__(self) -> None:
        self.shards = 0
        self._found = 0
        self._bytes = 0
        self._digest = ListingDigest()

    def add(self, image: SourceImage) -> None:
        self._found += 1
        self._bytes += max(image.size, 0)
        self._digest.add(image)

    def plan(self, facts: dict[str, Any], notes: dict[str, Any]) -> Plan:
        return Plan(self.shards, self._found, self._bytes, self._digest.hexdigest(), facts, notes)


def _piece_name(output: OutputFolder, number: int) -> str:
    return output.work_name("plan", number, ".tsv")


def _line(image: SourceImage) -> bytes:
    """A candidate as a line: label, size, mtime_ns and key, separated by tabs; the key may hold any byte."""
    key, label, size, mtime_ns = image
    if b"\\" in key or b"\n" in key:
        key = key.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
    return b"%d\t%d\t%d\t%b\n" % (label, size, mtime_ns, key)


def _image(line: bytes) -> SourceImage:
    label, size, mtime_ns, key = line[:-1].split(b"\t", 3)
    if b"\\" in key:
        key = _ESCAPE.sub(lambda match: b"\n" if match[1] == b"n" else b"\\", key)
    return SourceImage(key, int(label), int(size), int(mtime_ns))


def _difference(new: SourceImage | None, old: SourceImage | None) -> str:
    if new is None or (old is not None and old.key < new.key and new.key != old.key):
        assert old is not None
        what = f"{key_to_str(old.key)!r} is gone or has moved in the order"
    elif old is None or new.key != old.key:
        what = f"{key_to_str(new.key)!r} is new or has moved in the order"
    elif new.size != old.size:
        what = f"{key_to_str(new.key)!r} has {new.size:,} bytes, had {old.size:,}"
    elif new.label != old.label:
        what = f"{key_to_str(new.key)!r} has label {new.label}, had {old.label}"
    else:
        what = f"{key_to_str(new.key)!r} was modified since"
    return f"the source has changed since this set was begun: {what}. Put it back, or start again with --overwrite"
