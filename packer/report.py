"""`PackReport`: what a run found, packed, rejected and passed over; as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from readers.layout import counted
from readers.manifest import Manifest

from .rejects import describe

__all__ = ["PackReport", "Tallies"]

_SURPRISES = {
    "animated": "have several frames or pages: the first is the sample",
    "alpha": "are transparent: decoding composites them over white",
    "16-bit": "have more than 8 bits a channel: decoding scales gray to 8, and clips 32-bit as Pillow does",
    "cmyk": "are CMYK: decoding converts them to RGB as Pillow does, without colour management",
    "bad-metadata": "have broken metadata (EXIF or the like); their pixels are good",
    "large": "have more than 89,478,485 pixels, Pillow's warning limit",
}


@dataclass
class Tallies:
    """Sums over the receipts of all shards."""

    classes: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    orientations: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    payload_bytes: int = 0
    first_reject: str = ""

    def add(self, receipt: dict[str, Any]) -> None:
        """Count a shard in."""
        for kind, counts in receipt["counts"].items():
            getattr(self, kind).update(counts)
        self.payload_bytes += receipt["payload_bytes"]
        for reject in receipt["rejects"]:
            self.reasons[reject["reason"]] += 1
            if not self.first_reject:
                self.first_reject = describe(reject)


@dataclass(frozen=True)
class PackReport:
    """Result of a run.

    Attributes:
        out: The packed set.
        container: "hdf5" or "lmdb".
        listed: Everything the scan came across: found + ignored + skipped.
        found: Image files: packed + rejected.
        packed, rejected: Records in the set; files that could not be packed, listed in ``rejects.jsonl``.
        reasons: Rejects by reason.
        ignored: Files without an image extension, and images beside the class folders, by kind.
        skipped: Hidden and system files and folders.
        shards, bytes, payload_bytes: Shards; their size; the size of images and keys in them.
        seconds: Time this run took.
        resumed: Shards that an earlier run had finished.
        already_done: The set was complete before this run; nothing was written.
        classes: Number of classes, None without labels.
        formats, modes, orientations, flags: Records by real format, by mode, by EXIF orientation other than
            1, by property ("animated", "alpha", "16-bit", "cmyk", "icc", "bad-metadata", "large").
        warnings: One line for each kind of thing that may surprise in training.
    """

    out: str
    container: str
    listed: int
    found: int
    packed: int
    rejected: int
    reasons: dict[str, int]
    ignored: dict[str, int]
    skipped: int
    shards: int
    bytes: int
    payload_bytes: int
    seconds: float
    resumed: int
    already_done: bool
    classes: int | None
    formats: dict[str, int]
    modes: dict[str, int]
    orientations: dict[str, int]
    flags: dict[str, int]
    warnings: list[str]

    @classmethod
    def make(
        cls,
        out: str,
        manifest: Manifest,
        tallies: Tallies,
        notes: dict[str, Any],
        *,
        seconds: float,
        resumed: int,
        already_done: bool = False,
    ) -> PackReport:
        """Put a report together from the finished set and what the scan noted."""
        ignored = dict(notes["ignored"])
        if notes["outside"]:
            ignored["outside the class folders"] = notes["outside"]
        found = manifest.records + manifest.rejected
        return cls(
            out=out,
            container=manifest.container,
            listed=found + sum(ignored.values()) + notes["hidden"],
            found=found,
            packed=manifest.records,
            rejected=manifest.rejected,
            reasons=dict(tallies.reasons.most_common()),
            ignored=ignored,
            skipped=notes["hidden"],
            shards=len(manifest.shard_ids),
            bytes=sum(manifest.shard_bytes),
            payload_bytes=tallies.payload_bytes,
            seconds=round(seconds, 3),
            resumed=resumed,
            already_done=already_done,
            classes=None if manifest.classes is None else len(manifest.classes),
            formats=dict(tallies.formats.most_common()),
            modes=dict(tallies.modes.most_common()),
            orientations=dict(sorted(tallies.orientations.items())),
            flags=dict(tallies.flags),
            warnings=_warnings(manifest, tallies, notes),
        )

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        labels = "no labels" if self.classes is None else counted(self.classes, "class", "classes")
        if self.already_done:
            head = f"{self.out}: already packed: {counted(self.packed, 'image')}, {labels}"
            return [head, *(f"note: {warning}" for warning in self.warnings)]
        rate = self.packed / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.out}: {counted(self.packed, 'image')}, {labels}, "
            f"{counted(self.shards, self.container + ' shard')}, "
            f"{self.bytes / 2**20:,.1f} MiB ({self.bytes / max(self.payload_bytes, 1):.3f} of the payload), "
            f"{self.seconds:,.1f} s, {rate:,.0f} images/s",
            f"found {self.found:,} = packed {self.packed:,} + rejected {self.rejected:,}"
            + (
                f"; {counted(self.resumed, 'shard was', 'shards were')} there from an earlier run"
                if self.resumed
                else ""
            ),
        ]
        if self.formats and "unknown" not in self.formats:
            lines.append(f"formats: {_listed(self.formats)}; modes: {_listed(self.modes)}")
        if self.ignored:
            lines.append(f"ignored {sum(self.ignored.values()):,} files: {_listed(self.ignored)}")
        if self.skipped:
            lines.append(f"skipped {self.skipped:,} hidden or system files and folders")
        return lines + [f"note: {warning}" for warning in self.warnings]


def _warnings(manifest: Manifest, tallies: Tallies, notes: dict[str, Any]) -> list[str]:
    lines = []
    if manifest.rejected:
        lines.append(
            f"{manifest.rejected:,} of {manifest.records + manifest.rejected:,} images rejected "
            f"({_listed(tallies.reasons)}), first {tallies.first_reject}. See rejects.jsonl"
        )
    turned = sum(tallies.orientations.values())
    if turned:
        lines.append(
            f"{counted(turned, 'image')} carry an EXIF orientation: samples come unturned, as from ImageFolder, "
            "unless ShardDataset gets exif_transpose=True"
        )
    lines += [
        f"{counted(tallies.flags[kind], 'image')} {text}" for kind, text in _SURPRISES.items() if tallies.flags[kind]
    ]
    if notes["loops"]:
        lines.append(f"links that lead back to their own folder were not followed, first {notes['loops'][0]!r}")
    if notes["outside"]:
        lines.append(
            f"{counted(notes['outside'], 'image')} beside the class folders ignored, as ImageFolder does; "
            "--labels none packs everything without labels"
        )
    return lines + _empty_classes(manifest) + _differences(manifest, notes)


def _empty_classes(manifest: Manifest) -> list[str]:
    if manifest.classes is None or manifest.class_counts is None:
        return []
    empty = [name for name, count in zip(manifest.classes, manifest.class_counts, strict=True) if not count]
    if not empty:
        return []
    return [f"{counted(len(empty), 'class', 'classes')} without images, first {empty[0]!r}; their indices are kept"]


def _differences(manifest: Manifest, notes: dict[str, Any]) -> list[str]:
    """Why ImageFolder over the same source would have other samples, in one line."""
    if manifest.classes is None:
        return []
    reasons = []
    if manifest.rejected:
        reasons.append(f"{manifest.rejected:,} rejected files")
    if sum(notes["extra"].values()):
        reasons.append(f"files it would not take ({_listed(notes['extra'])})")
    if notes["hidden_images"]:
        reasons.append(f"{notes['hidden_images']:,} hidden files or folders it may take")
    if manifest.options.get("shuffle") is not None:
        reasons.append("the stored shuffle")
    if _empty_classes(manifest):
        reasons.append("an empty class (it needs allow_empty=True)")
    if not reasons:
        return []
    return [f"sample indices differ from ImageFolder's on this source: {', '.join(reasons)}"]


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:8]) + (
        ", ..." if len(counts) > 8 else ""
    )
