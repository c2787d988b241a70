"""Do all arms of a comparison deliver the same images? Otherwise their rates mean nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from ..decode import Decoder
from ..layout import key_to_str
from .arms import Arm, FilesArm
from .options import CompareError

__all__ = ["check_bytes", "check_samples"]


def check_samples(arms: Sequence[Arm], decoder: Decoder) -> list[str]:
    """Compare pixels and labels of every image in the arms, decoded as in the timed runs.

    Returns:
        BLAKE3-128 over keys, labels, sizes and pixels, one an arm: all equal.

    Raises:
        CompareError: An image differs.
        ReaderError: An image cannot be read.
    """
    keys = _keys(arms)
    datasets = [arm.dataset(decoder, np.asarray) for arm in arms]
    hashers = [blake3() for _ in arms]
    for place, key in enumerate(keys):
        parts = [_parts(key, dataset[place]) for dataset in datasets]
        for arm, part, hasher in zip(arms, parts, hashers, strict=True):
            _check_part(arms[0], arm, key, parts[0], part)
            for value in part.values():
                hasher.update(value)
    return [hasher.hexdigest(length=16) for hasher in hashers]


def check_bytes(arms: Sequence[Arm]) -> int:
    """Compare the stored bytes of every image in the arms, which also brings them into the page cache.

    Returns:
        Bytes of all images together.

    Raises:
        CompareError: An image differs.
        ReaderError: An image cannot be read.
    """
    total = 0
    datasets = [arm.dataset("bytes", None) for arm in arms]
    for place, key in enumerate(_keys(arms)):
        data, *others = [image_of(dataset[place]) for dataset in datasets]
        for arm, other in zip(arms[1:], others, strict=True):
            if data != other:
                raise _differs(arms[0], arm, key, f"the file has {len(data):,} bytes, the record {len(other):,}")
        total += len(data)
    return total


def image_of(sample: Any) -> Any:
    """The image of a sample, which in a set without classes is the sample."""
    return sample[0] if isinstance(sample, tuple) else sample


def _keys(arms: Sequence[Arm]) -> Sequence[bytes]:
    files = arms[0]
    assert isinstance(files, FilesArm)
    return files.keys


def _parts(key: bytes, sample: Any) -> dict[str, bytes]:
    """What must agree, by the name an error gives it."""
    label = sample[1] if isinstance(sample, tuple) else None
    pixels = image_of(sample)
    return {"key": key, "label": str(label).encode(), "size": str(pixels.shape).encode(), "pixels": pixels.tobytes()}


def _check_part(files: Arm, arm: Arm, key: bytes, expected: dict[str, bytes], found: dict[str, bytes]) -> None:
    for name, value in found.items():
        if value != expected[name]:
            raise _differs(files, arm, key, f"another {name}" if name != "pixels" else "other pixels")


def _differs(files: Arm, arm: Arm, key: bytes, what: str) -> CompareError:
    return CompareError(
        f"{key_to_str(key)!r} differs between {files.root} and {arm.name}: {what}. "
        "The source has changed since it was packed: pack it again, or give the SOURCE that was packed"
    )
