"""A stored random order: every candidate once, by a seeded digest of its key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from readers.layout import key_to_str, shuffle_key

from .external_sort import Scratch, external_sort
from .items import SourceImage

__all__ = ["shuffled"]


def shuffled(images: Iterable[SourceImage], seed: int, scratch: Scratch) -> Iterator[SourceImage]:
    """Yield ``images`` in the order of `layout.shuffle_key`, ties by key; sorts through scratch files."""
    rows: Iterator[list[Any]] = (
        [shuffle_key(image.key, seed).hex(), key_to_str(image.key), image.label, image.size, image.mtime_ns]
        for image in images
    )
    for _, key, label, size, mtime_ns in external_sort(rows, scratch, key=lambda row: row[:2]):
        yield SourceImage(key.encode("utf-8", "surrogateescape"), label, size, mtime_ns)
