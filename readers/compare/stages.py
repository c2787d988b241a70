"""Where the time of one image goes: reading, decoding, transforming, one after the other in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Subset

from ..decode import Decoder
from .arms import Arm
from .checks import image_of
from .failures import explain
from .options import CompareError

__all__ = ["Stages", "time_stages"]

#: Enough images for a mean that stands still, within a time nobody minds.
_MOST_IMAGES: Final = 256
_LEAST_IMAGES: Final = 8
_MOST_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Stages:
    """Mean milliseconds an image.

    Attributes:
        read: Opening and reading a file; finding, reading and checksumming a record.
        decode: Stored bytes -> RGB pixels.
        transform: The transform.
    """

    read: float
    decode: float
    transform: float

    @property
    def total(self) -> float:
        """All stages together."""
        return self.read + self.decode + self.transform


def time_stages(
    arms: Sequence[Arm], decoder: Decoder, transform: Callable[[Any], Any], images: int, *, passes: int
) -> list[Stages]:
    """Time the stages of every arm on the same first images of the reading order.

    Args:
        arms: The arms; they take turns at each image.
        decoder: Stored bytes -> image.
        transform: Called with the image.
        images: Images in each arm.
        passes: Times that each image is measured, of which the quickest counts: other programs only ever add to
            a time. 1 where reading an image brings it into memory.

    Raises:
        CompareError: An image cannot be read, decoded or transformed.
    """
    datasets = [arm.dataset("bytes", None) for arm in arms]
    for dataset in datasets:
        _open_shards(dataset, _MOST_IMAGES)
    times: list[list[list[float]]] = []
    until = time.perf_counter() + _MOST_SECONDS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        for place in range(min(images, _MOST_IMAGES)):
            times.append([_quickest(dataset, place, decoder, transform, passes) for dataset in datasets])
            if time.perf_counter() > until and place + 1 >= _LEAST_IMAGES:
                break
    except Exception as error:
        raise CompareError(explain(error)) from error
    finally:
        torch.set_num_threads(threads)
    return [Stages(*row) for row in (1000 * np.mean(times, axis=0)).tolist()]


def _open_shards(dataset: Any, images: int) -> None:
    """Open the shards that hold these images, without reading any: once an epoch, it is no part of an image's time."""
    if isinstance(dataset, Subset):
        for index in dataset.indices[:images]:
            dataset.dataset.label(index)  # type: ignore[attr-defined]


def _quickest(dataset: Any, place: int, decoder: Decoder, transform: Callable[[Any], Any], passes: int) -> list[float]:
    """Seconds of each stage, each the least of the passes."""
    rounds = [_time_image(dataset, place, decoder, transform) for _ in range(passes)]
    return [min(seconds) for seconds in zip(*rounds, strict=True)]


def _time_image(
    dataset: Any, place: int, decoder: Decoder, transform: Callable[[Any], Any]
) -> tuple[float, float, float]:
    start = time.perf_counter()
    data = image_of(dataset[place])
    read = time.perf_counter()
    image = decoder(data)
    decoded = time.perf_counter()
    transform(image)
    return read - start, decoded - read, time.perf_counter() - decoded
