"""`CompareReport`: what a comparison measured, as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ..page_cache import Dropped
from .runs import Run
from .stages import Stages

__all__ = ["ArmFigures", "CacheTable", "CompareReport", "Quartiles"]

_UNITS: Final = {
    "images_per_second": "images/s, after each worker's first batch, copying to the device included",
    "first_batch_seconds": "s, from before the workers start until the first batch is on the device",
    "wait_share": "share of the steady time spent waiting for the loader, 0 to 1",
    "stages_ms": "ms an image, one after the other in one process",
    "ratio_to_files": "median images/s of the arm / of the files",
}


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of repeated measurements, interpolated linearly."""

    p25: float
    median: float
    p75: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Of at least one value."""
        p25, median, p75 = np.percentile(values, [25, 50, 75]).tolist()
        return cls(p25, median, p75, tuple(values))

    def overlaps(self, other: Quartiles) -> bool:
        """True if the middle halves have values in common: the difference may be chance."""
        return self.p25 <= other.p75 and other.p25 <= self.p75


@dataclass(frozen=True)
class ArmFigures:
    """What was measured of one arm in one state of the cache.

    Attributes:
        name: "files", or the set's folder as given.
        runs: Its timed runs.
        stages: Where the time of an image goes.
        dropped: What left the page cache before each run, at the worst of them; None with a warm cache.
    """

    name: str
    runs: tuple[Run, ...]
    stages: Stages
    dropped: Dropped | None = None

    @property
    def rate(self) -> Quartiles:
        """Steady images/s."""
        return self._quartiles(lambda run: run.images_per_second)

    @property
    def first_batch_seconds(self) -> Quartiles:
        """Seconds until the first batch."""
        return self._quartiles(lambda run: run.first_batch_seconds)

    @property
    def wait_share(self) -> Quartiles:
        """Share of the steady time that went into waiting for the loader."""
        return self._quartiles(lambda run: run.wait_seconds / run.steady_seconds)

    def _quartiles(self, value: Callable[[Run], float]) -> Quartiles:
        return Quartiles.of([value(run) for run in self.runs])


@dataclass(frozen=True)
class CacheTable:
    """All arms in one state of the page cache, "warm" or "cold"; the files come first."""

    cache: str
    arms: tuple[ArmFigures, ...]

    @property
    def files(self) -> ArmFigures:
        """The arm that the others are compared with."""
        return self.arms[0]

    def ratio(self, arm: ArmFigures) -> float:
        """How many times as fast as the files, by the medians."""
        return arm.rate.median / self.files.rate.median

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"cache": self.cache, "arms": [self._arm_dict(arm) for arm in self.arms]}

    def _arm_dict(self, arm: ArmFigures) -> dict[str, Any]:
        return {
            "name": arm.name,
            "images_per_second": dataclasses.asdict(arm.rate),
            "first_batch_seconds": dataclasses.asdict(arm.first_batch_seconds),
            "wait_share": dataclasses.asdict(arm.wait_share),
            "ratio_to_files": self.ratio(arm),
            "stages_ms": dataclasses.asdict(arm.stages),
            "images_a_run": [run.images for run in arm.runs],
            "dropped": None if arm.dropped is None else dataclasses.asdict(arm.dropped),
        }


@dataclass(frozen=True)
class CompareReport:
    """Result of `compare`.

    Attributes:
        arms: name, kind ("files", "hdf5", "lmdb"), root, storage and checksum of each arm. ``checksum`` is
            BLAKE3-128 over keys, labels and pixels of the checked images: equal in all arms.
        images: ``in_set``, ``measured``, ``checked`` (pixels and labels compared), ``bytes`` (of the measured
            images, all compared).
        settings: The options, with defaults filled in.
        shared_memory: ``needed_bytes`` for batches on their way, ``free_bytes`` in /dev/shm (None: there is none).
        machine: ``versions``, ``commit`` and the machine.
        tables: One for each state of the cache.
    """

    arms: tuple[dict[str, Any], ...]
    images: dict[str, int]
    settings: dict[str, Any]
    shared_memory: dict[str, int | None]
    machine: dict[str, Any]
    tables: tuple[CacheTable, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **self.machine,
            "settings": self.settings,
            "images": self.images,
            "arms": list(self.arms),
            "shared_memory": self.shared_memory,
            "units": dict(_UNITS),
            "repeats": self.settings["repeats"],
            "tables": [table.to_dict() for table in self.tables],
            "text": self.lines(),
        }

    def lines(self) -> list[str]:
        """For people: what was compared, the tables, and what limits the rate."""
        from .text import report_lines

        return report_lines(self)
