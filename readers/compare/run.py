"""Before and after: load the same images from their files and from packed sets, and say what limits the rate."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils.data import default_collate

from ..decode import Decoder, make_decoder
from ..machine import commit, machine, storage, versions
from ..page_cache import Dropped, drop_files
from .arms import Arm, SquareTensor, draw, make_arms, open_sets
from .checks import check_bytes, check_samples
from .failures import explain
from .options import CompareError, CompareOptions, CompareUsageError
from .report import ArmFigures, CacheTable, CompareReport
from .runs import Run, RunSettings, time_run
from .stages import Stages, time_stages

__all__ = ["CompareError", "CompareOptions", "CompareReport", "CompareUsageError", "compare"]

#: Images of which pixels and labels are compared before anything is timed.
_CHECKED: Final = 64
#: Times that a stage is measured with a warm cache; the quickest counts.
_WARM_PASSES: Final = 3
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  only its free space is asked for


def compare(
    source: str | os.PathLike[str],
    outs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    options: CompareOptions | None = None,
    *,
    notify: Callable[[str], None] | None = None,
) -> CompareReport:
    """Time a DataLoader over the files of ``source`` and over each packed set, in turns.

    First makes sure that all of them deliver the same images.

    Args:
        source: The folder that the sets were packed from.
        outs: One packed set or more.
        options: How to compare.
        notify: Called with a line of text whenever something long begins.

    Raises:
        CompareUsageError: Paths or options make no sense; nothing was measured.
        CompareError: The arms differ, or a run failed.
        ReaderError: A set cannot be read; a damaged record, for example.
        OSError: A file cannot be opened.
    """
    if isinstance(outs, (str, os.PathLike)):
        outs = [outs]
    comparison = _Comparison(os.fspath(source), [os.fspath(out) for out in outs], options or CompareOptions())
    return comparison.run(notify or (lambda text: None))


class _Comparison:
    """One call of `compare`."""

    def __init__(self, source: str, outs: Sequence[str], options: CompareOptions) -> None:
        if not os.path.isdir(source):
            raise CompareUsageError(f"{source}: no such folder. Give the folder that was packed")
        if not outs:
            raise CompareUsageError("give at least one packed set")
        self._options = options
        sets = open_sets(outs)
        total = len(sets[0])
        self._total = total
        self._images = min(total, options.max_images) if options.max_images else total
        self._settings = RunSettings.of(options, self._images)
        decoder = make_decoder(
            "pil", exif_transpose=options.exif_transpose, max_pixels=sets[0].manifest.options.get("max_pixels")
        )
        assert decoder is not None
        self._decoder: Decoder = decoder
        self._transform = options.transform or SquareTensor(options.image_size)
        self._checked = make_arms(source, outs, sets, draw(total, _CHECKED, options.seed, ends=True))
        self._arms = make_arms(source, outs, sets, draw(total, options.max_images, options.seed))

    def run(self, notify: Callable[[str], None]) -> CompareReport:
        """Check, measure, report."""
        checked = len(self._checked[0].dataset("bytes", None))
        notify(f"checking pixels and labels of {checked:,} images in {len(self._arms)} arms")
        checksums = check_samples(self._checked, self._decoder)
        notify(f"comparing the bytes of {self._images:,} images, which also warms the cache")
        size = check_bytes(self._arms)
        shared_memory = self._shared_memory()  # before the runs: also tells whether samples collate
        states = ["warm", "cold"] if self._options.cold else ["warm"]
        return CompareReport(
            arms=tuple(_described(arm, checksum) for arm, checksum in zip(self._arms, checksums, strict=True)),
            images={"in_set": self._total, "measured": self._images, "checked": checked, "bytes": size},
            settings=self._settings_dict(),
            shared_memory=shared_memory,
            machine={"commit": commit(), "versions": versions(), "machine": machine()},
            tables=tuple(self._table(state, notify) for state in states),
        )

    def _settings_dict(self) -> dict[str, Any]:
        settings = dataclasses.asdict(self._options)
        return settings | {
            "num_workers": self._settings.workers,
            "batch_size": self._settings.batch_size,
            "device": self._settings.device.type,
            "start_method": self._settings.start_method if self._settings.workers else None,
            "transform": repr(self._transform),
        }

    def _shared_memory(self) -> dict[str, int | None]:
        """Batches on their way from the workers, by the size of a sample as it collates."""
        sample = self._arms[0].dataset(self._decoder, self._transform)[0]
        try:
            batch_bytes = self._settings.batch_size * _tensor_bytes(default_collate([sample]))
        except Exception as error:
            raise CompareError(f"samples cannot be put into a batch: {explain(error)}") from error
        free = shutil.disk_usage(_SHARED_MEMORY).free if os.path.isdir(_SHARED_MEMORY) else None
        return {
            "needed_bytes": self._settings.workers * self._settings.prefetch_factor * batch_bytes,
            "free_bytes": free,
        }

    # -- measuring

    def _table(self, cache: str, notify: Callable[[str], None]) -> CacheTable:
        """All runs in one state of the cache, the arms taking turns."""
        runs: list[list[Run]] = [[] for _ in self._arms]
        dropped: list[list[Dropped]] = [[] for _ in self._arms]
        for repeat in range(self._options.repeats):
            notify(f"{cache} cache, run {repeat + 1} of {self._options.repeats} of each arm")
            for number, arm in enumerate(self._arms):
                if cache == "cold":
                    dropped[number].append(drop_files(arm.files()))
                runs[number].append(self._run(arm))
        worst = [max(each, key=lambda one: one.cached_share, default=None) for each in dropped]
        columns = zip(self._arms, runs, self._stages(cache), worst, strict=True)
        figures = (ArmFigures(arm.name, tuple(own), stages, least) for arm, own, stages, least in columns)
        return CacheTable(cache, tuple(figures))

    def _stages(self, cache: str) -> list[Stages]:
        if cache == "cold":
            for arm in self._arms:
                drop_files(arm.files())
        passes = 1 if cache == "cold" else _WARM_PASSES
        return time_stages(self._arms, self._decoder, self._transform, self._images, passes=passes)

    def _run(self, arm: Arm) -> Run:
        return time_run(arm.dataset(self._decoder, self._transform), self._images, self._settings)


def _described(arm: Arm, checksum: str) -> dict[str, Any]:
    root = os.path.abspath(arm.root)
    return {"name": arm.name, "kind": arm.kind, "root": root, "storage": storage(root), "checksum": checksum}


def _tensor_bytes(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return sum(_tensor_bytes(value) for value in values)
