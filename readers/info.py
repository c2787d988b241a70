"""What is in a packed set: counts and sizes from the manifest, kinds of images from the indexes."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from .handles import Shard, open_shard
from .layout import FLAGS, FORMAT_NAMES, MODE_NAMES, counted, key_to_str
from .manifest import Manifest

__all__ = ["duplicates", "info", "info_lines"]


def info(root: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a set; reads the manifest and every shard's index, no image.

    Returns:
        Members ``root``, ``container``, ``records``, ``rejected``, ``classes`` (name -> records, or None),
        ``shards``, ``bytes``, ``payload_bytes`` (images and keys), ``overhead`` (bytes / payload_bytes),
        ``image_bytes`` (mean, least, most), ``formats``, ``modes``, ``orientations``, ``flags`` (counts),
        ``options``, ``source``, ``set_id``, ``created_by``.

    Raises:
        UnfinishedSetError, ManifestError, ShardNotFoundError, ShardCorruptError: It cannot be described.
    """
    path = os.fspath(root)
    manifest = Manifest.load(path)
    manifest.check_files(path)
    sums = _Sums()
    for number in range(len(manifest.shard_ids)):
        sums.add(open_shard(path, manifest, number))
    size = sum(manifest.shard_bytes)
    counts = manifest.class_counts or ()
    return {
        "root": path,
        "container": manifest.container,
        "records": manifest.records,
        "rejected": manifest.rejected,
        "classes": None if manifest.classes is None else dict(zip(manifest.classes, counts, strict=True)),
        "shards": len(manifest.shard_ids),
        "bytes": size,
        "payload_bytes": sums.payload_bytes,
        "overhead": round(size / max(sums.payload_bytes, 1), 4),
        "image_bytes": {
            "mean": round(sums.image_bytes / max(manifest.records, 1)),
            "least": sums.least,
            "most": sums.most,
        },
        **sums.kinds(),
        "options": dict(manifest.options),
        "source": dict(manifest.source),
        "set_id": manifest.set_id,
        "created_by": manifest.created_by,
    }


class _Sums:
    """Sums over the indexes, a shard at a time."""

    def __init__(self) -> None:
        self.payload_bytes = 0
        self.image_bytes = 0
        self.least = 0
        self.most = 0
        self._columns: dict[str, Counter[int]] = defaultdict(Counter)

    def add(self, shard: Shard) -> None:
        rows = shard.rows()
        if not len(rows):
            return
        lengths = rows["image_length"]
        images = int(lengths.sum(dtype=np.int64))
        self.least = min(self.least or int(lengths.min()), int(lengths.min()))
        self.most = max(self.most, int(lengths.max()))
        self.image_bytes += images
        self.payload_bytes += images + int(rows["key_length"].sum(dtype=np.int64))
        for name in ("format", "mode", "orientation", "flags"):
            values, counts = np.unique(rows[name], return_counts=True)
            self._columns[name].update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def kinds(self) -> dict[str, dict[str, int]]:
        flags = {
            name: sum(n for bits, n in self._columns["flags"].items() if bits & bit) for name, bit in FLAGS.items()
        }
        return {
            "formats": {FORMAT_NAMES.get(code, "unknown"): n for code, n in self._columns["format"].most_common()},
            "modes": {MODE_NAMES.get(code, "unknown"): n for code, n in self._columns["mode"].most_common()},
            "orientations": {str(code): n for code, n in sorted(self._columns["orientation"].items()) if code > 1},
            "flags": {name: n for name, n in flags.items() if n},
        }


def info_lines(facts: dict[str, Any]) -> list[str]:
    """`info`'s result for people."""
    sizes = facts["image_bytes"]
    lines = [
        f"{facts['root']}: {counted(facts['records'], 'image')} in "
        f"{counted(facts['shards'], facts['container'] + ' shard')}, "
        f"{facts['rejected']:,} rejected when packed",
        f"size: {facts['bytes'] / 2**20:,.1f} MiB, {facts['overhead']:.3f} of the payload "
        f"({facts['payload_bytes'] / 2**20:,.1f} MiB of images and keys)",
        f"an image: {sizes['mean']:,} bytes on average, {sizes['least']:,} to {sizes['most']:,}",
    ]
    lines += [
        f"{name}: {_listed(facts[name])}" for name in ("formats", "modes", "orientations", "flags") if facts[name]
    ]
    if facts["classes"] is None:
        lines.append("no labels")
    else:
        lines.append(f"{counted(len(facts['classes']), 'class', 'classes')}: {_listed(facts['classes'], most=20)}")
    lines.append(f"packed by {facts['created_by']}, set {facts['set_id']}")
    return lines


def duplicates(root: str | os.PathLike[str]) -> list[list[str]]:
    """Groups of records whose images are byte for byte the same, as lists of keys.

    Candidates share length and CRC-32C in the indexes; their bytes are compared.
    """
    path = os.fspath(root)
    manifest = Manifest.load(path)
    candidates: dict[bytes, list[str]] = defaultdict(list)
    for number, position in _same_length_and_crc(path, manifest):
        shard = open_shard(path, manifest, number)
        candidates[shard.image(position)[0]].append(key_to_str(shard.key(position)))
    return [keys for keys in candidates.values() if len(keys) > 1]


def _same_length_and_crc(root: str, manifest: Manifest) -> list[tuple[int, int]]:
    """(shard, position) of every record that shares length and CRC-32C with another; 8 bytes a record in memory."""
    prints = np.zeros(manifest.records, np.uint64)
    for number, count in enumerate(manifest.shard_records):
        rows = open_shard(root, manifest, number).rows()
        first = manifest.first_index(number)
        prints[first : first + count] = rows["image_length"].astype(np.uint64) << np.uint64(32) | rows["image_crc32c"]
    order = np.argsort(prints, kind="stable")
    same = prints[order][1:] == prints[order][:-1]
    twice = np.union1d(order[1:][same], order[:-1][same])
    return [manifest.locate(int(index)) for index in twice]


def _listed(counts: dict[str, int], most: int = 8) -> str:
    items = list(counts.items())[:most]
    shown = ", ".join(f"{name if name.isprintable() else repr(name)} {count:,}" for name, count in items)
    return shown + (f", ... ({len(counts):,} in all)" if len(counts) > most else "")
