"""Is a finished set still the image of its source? Asked when the same command is run again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

from readers.handles import open_shard
from readers.info import info
from readers.layout import REJECTS_NAME, key_from_json, key_to_str
from readers.manifest import Manifest

from .errors import PackError
from .items import UNKNOWN, SourceImage
from .workspace import ListingDigest

__all__ = ["compare_finished", "finished_receipt"]

_ADVICE: Final = "Put it back, or start again with --overwrite"


def compare_finished(out: str, manifest: Manifest, images: Iterable[SourceImage]) -> None:
    """Compare a source, in packing order, with a finished set.

    Raises:
        PackError: They differ; names the first difference.
    """
    digest = ListingDigest()
    stored = _stored(out, manifest)
    rejected = _rejected(out)
    difference = ""
    ahead = next(stored, None)
    for image in images:
        digest.add(image)
        if difference:
            continue
        if ahead is not None and ahead[0] == image.key:
            if image.size not in (UNKNOWN, ahead[1]):
                difference = f"{key_to_str(image.key)!r} has {image.size:,} bytes, had {ahead[1]:,}"
            ahead = next(stored, None)
        elif image.key not in rejected:
            difference = f"{key_to_str(image.key)!r} is new, or another file before it is gone"
    if digest.hexdigest() == manifest.source["listing_blake3"]:
        return
    if ahead is not None and not difference:
        difference = f"{key_to_str(ahead[0])!r} is gone"
    raise PackError(
        f"{out!r} is finished, but the source has changed since: {difference or 'a rejected file'}. {_ADVICE}"
    )


def finished_receipt(out: str) -> dict[str, Any]:
    """One receipt for a whole finished set, whose own are gone: counts by kind, payload, rejects.

    Raises:
        ReaderError: The set is damaged.
    """
    facts = info(out)
    counts = {kind: facts[kind] for kind in ("formats", "modes", "orientations", "flags")}
    return {"counts": counts, "payload_bytes": facts["payload_bytes"], "rejects": list(_reject_lines(out))}


def _stored(out: str, manifest: Manifest) -> Iterator[tuple[bytes, int]]:
    """(key, image length) of every record."""
    for number, records in enumerate(manifest.shard_records):
        if records:
            shard = open_shard(out, manifest, number)
            lengths = shard.rows()["image_length"]
            for position in range(records):
                yield shard.key(position), int(lengths[position])


def _rejected(out: str) -> set[bytes]:
    return {key_from_json(line) for line in _reject_lines(out)}


def _reject_lines(out: str) -> Iterator[dict[str, Any]]:
    path = os.path.join(out, REJECTS_NAME)
    if os.path.exists(path):
        with open(path, "rb") as file:
            yield from map(json.loads, file)
