"""Which candidate goes into which shard: pure and deterministic, decided before any work starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .items import SourceImage

__all__ = ["assign_shards"]


def assign_shards(
    images: Iterable[SourceImage], *, shard_bytes: int | None, shard_records: int | None
) -> Iterator[tuple[int, SourceImage]]:
    """Pair every candidate with its shard's number, in order, from 0.

    Shards are filled one after the other: by count if ``shard_records`` is given, else by bytes of images
    and keys, where a candidate larger than ``shard_bytes`` gets a shard of its own.
    """
    number, used_bytes, used_records = 0, 0, 0
    for image in images:
        size = image.size + len(image.key)
        full = used_records == shard_records if shard_bytes is None else used_bytes + size > shard_bytes
        if full and used_records:
            number, used_bytes, used_records = number + 1, 0, 0
        used_bytes += size
        used_records += 1
        yield number, image
