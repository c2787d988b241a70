"""What a comparison of files and shards is asked to do, and how it says no."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ..errors import ReaderError
from ..system import usable_cores

__all__ = ["DEVICES", "CompareError", "CompareOptions", "CompareUsageError"]

DEVICES: Final = ("auto", "cpu", "cuda")
#: Past this the loader's own memory and start-up would be what is measured.
_MOST_WORKERS: Final = 16
_MOST_BATCH: Final = 64
#: Batches for each worker that a default batch size leaves room for, so that a rate can settle.
_BATCHES_PER_WORKER: Final = 4


class CompareError(ReaderError, RuntimeError):
    """The arms differ, or a run failed; the message is one line that says what to do."""

    exit_status: ClassVar[int] = 1


class CompareUsageError(CompareError, ValueError):
    """Paths or options make no sense; nothing was measured."""

    exit_status: ClassVar[int] = 2


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """How to compare.

    Attributes:
        repeats: Timed runs of each arm; the arms take turns.
        max_seconds: Steady seconds after which a run of one arm stops; sooner if its images are through.
        max_images: Images to measure with, drawn from the set by ``seed``; 0: all.
        cold: Measure with the page cache dropped too (Linux).
        num_workers: Worker processes; 0 loads in this process; None: the cores it may use, at most 16.
        batch_size: Images a batch; None: 64, less in a set so small that a worker would get under 4 batches.
        prefetch_factor: Batches that each worker prepares ahead.
        device: Where batches go, "cpu" or "cuda"; "auto": CUDA if it is there.
        start_method: "fork", "spawn" or "forkserver"; None: Python's own choice.
        timeout_seconds: Longest wait for a batch from the workers before the run is called hung.
        image_size: Images are resized to a square of this side, in pixels.
        exif_transpose: Turn pictures upright by their EXIF orientation, in every arm.
        seed: Decides which images, and their order.
        transform: Replaces the resizing; gets a PIL image in RGB and must pickle for "spawn".

    Raises:
        CompareUsageError: A value makes no sense.
    """

    repeats: int = 5
    max_seconds: float = 10.0
    max_images: int = 20_000
    cold: bool = False
    num_workers: int | None = None
    batch_size: int | None = None
    prefetch_factor: int = 2
    device: str = "auto"
    start_method: str | None = None
    timeout_seconds: float = 120.0
    image_size: int = 224
    exif_transpose: bool = False
    seed: int = 0
    transform: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("repeats", 1), ("max_images", 0), ("num_workers", 0), ("batch_size", 1), ("prefetch_factor", 1),
            ("image_size", 1), ("seed", 0),
        ):  # fmt: skip
            _check_whole(name, getattr(self, name), least)
        for name in ("max_seconds", "timeout_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise CompareUsageError(f"{_word(name)} must be above 0 seconds, got {getattr(self, name)!r}")
        _check_choice("device", self.device, DEVICES)
        if self.start_method is not None:
            _check_choice("start_method", self.start_method, multiprocessing.get_all_start_methods())
        if self.cold and sys.platform != "linux":
            raise CompareUsageError("cold needs Linux: elsewhere a program cannot drop its files from the page cache")

    @property
    def workers(self) -> int:
        """``num_workers``, or its default on this machine."""
        return min(usable_cores(), _MOST_WORKERS) if self.num_workers is None else self.num_workers

    @property
    def method(self) -> str:
        """``start_method``, or Python's choice; asked for without making that choice final for this process."""
        chosen = self.start_method or multiprocessing.get_start_method(allow_none=True)
        return chosen or multiprocessing.get_all_start_methods()[0]  # the first one is the default

    def batch_for(self, images: int) -> int:
        """``batch_size``, or its default for this many images.

        Raises:
            CompareUsageError: All images would be one batch, which has no rate.
        """
        batch = self.batch_size
        if batch is None:
            batch = max(1, min(_MOST_BATCH, images // (_BATCHES_PER_WORKER * max(1, self.workers))))
        if batch >= images:
            raise CompareUsageError(
                f"{images:,} images are one batch of {batch:,}, and a rate needs at least two. "
                + (f"Use a batch size of {images // 2:,} or less" if images > 1 else "Use a set with more images")
            )
        return batch


def _check_whole(name: str, value: Any, least: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise CompareUsageError(f"{_word(name)} must be a whole number, at least {least}, got {value!r}")


def _check_choice(name: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise CompareUsageError(f"{_word(name)} must be one of {', '.join(allowed)}, got {value!r}")


def _word(name: str) -> str:
    """An attribute's name as the command line spells it."""
    return name.removesuffix("_seconds" if name == "timeout_seconds" else "").replace("_", "-")
