"""One timed run of one arm through a stock DataLoader."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..loader import shard_loader
from .failures import explain
from .options import CompareError, CompareOptions, CompareUsageError

__all__ = ["Run", "RunSettings", "time_run"]


@dataclass(frozen=True)
class Run:
    """What one run measured.

    Attributes:
        first_batch_seconds: From before the workers were started until the first batch was on the device.
        images: Images delivered while the rate was steady.
        steady_seconds: How long that took.
        wait_seconds: The part of ``steady_seconds`` spent waiting for the loader; the rest is copying.
    """

    first_batch_seconds: float
    images: int
    steady_seconds: float
    wait_seconds: float

    @property
    def images_per_second(self) -> float:
        """The steady rate."""
        return self.images / self.steady_seconds


@dataclass(frozen=True)
class RunSettings:
    """What is the same in all runs of a comparison; see `CompareOptions` for the meaning of each."""

    batch_size: int
    workers: int
    prefetch_factor: int
    device: torch.device
    start_method: str
    timeout_seconds: float
    max_seconds: float
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def of(cls, options: CompareOptions, images: int) -> RunSettings:
        """Settings for a set of so many images.

        Raises:
            CompareUsageError: CUDA is asked for and not there, or all images would be one batch.
        """
        if options.device == "cuda" and not torch.cuda.is_available():
            raise CompareUsageError("device cuda: PyTorch finds no CUDA device here. Use cpu or auto")
        cuda = options.device != "cpu" and torch.cuda.is_available()
        return cls(
            batch_size=options.batch_for(images),
            workers=options.workers,
            prefetch_factor=options.prefetch_factor,
            device=torch.device("cuda" if cuda else "cpu"),
            start_method=options.method,
            timeout_seconds=options.timeout_seconds,
            max_seconds=options.max_seconds,
        )

    def lead(self, images: int) -> int:
        """Batches before the rate counts as steady: one a worker.

        The workers start together, so the first round arrives at once; counted from the first batch on, a run
        of n rounds would seem faster than it is by about one round in n.
        """
        return max(1, min(self.workers, -(-images // self.batch_size) // 2))

    def loader(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        """The loader of every arm; the dataset's own order is the shuffled one."""
        return shard_loader(
            dataset,
            self.batch_size,
            num_workers=self.workers,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=False,
            pin_memory=self.device.type == "cuda",
            multiprocessing_context=self.start_method,
            timeout=self.timeout_seconds,
        )

    def prepare(self) -> None:
        """Do what happens once in a process before the first run, so that no arm pays for it."""
        self.now()  # makes the CUDA context
        if self.workers and self.start_method != "fork":
            # Also because starting it later would unblock the Ctrl-C that `_ctrl_c_held` blocks.
            # Source: CPython 3.11, Lib/multiprocessing/resource_tracker.py, ensure_running().
            resource_tracker.ensure_running()

    def now(self) -> float:
        """The clock in seconds, once everything sent to the device is done there."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()


def time_run(dataset: Dataset[Any], images: int, settings: RunSettings) -> Run:
    """Load a dataset once, or for ``max_seconds`` of steady time.

    Args:
        dataset: Samples must collate.
        images: ``len(dataset)``.
        settings: How to load.

    Raises:
        CompareError: Anything that went wrong in the loader or its workers, in one line.
    """
    try:
        return _time_run(dataset, images, settings)
    except Exception as error:
        raise CompareError(explain(error)) from error


def _time_run(dataset: Dataset[Any], images: int, settings: RunSettings) -> Run:
    batches, size, lead = -(-images // settings.batch_size), settings.batch_size, settings.lead(images)
    settings.prepare()
    started = settings.clock()
    first = steady = waited = 0.0
    number = 0
    with _iterating(settings.loader(dataset)) as iterator:
        while number < batches:
            asked = settings.clock()
            batch = next(iterator)
            waited += settings.clock() - asked
            number += 1
            _to_device(batch, settings.device)
            if number == 1:
                first = settings.now() - started
            if number == lead:
                steady, waited = settings.now(), 0.0
            elif number > lead and settings.clock() - steady >= settings.max_seconds:
                break
        delivered = min(number * size, images) - lead * size
        return Run(first, delivered, settings.now() - steady, waited)


@contextmanager
def _iterating(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """The loader's iterator; its workers are gone afterwards, whatever happened."""
    with _ctrl_c_held():
        iterator = iter(loader)
    try:
        yield iterator
    finally:
        # Torch has no public name for this, and would do it in __del__, where a Ctrl-C is lost.
        with _ctrl_c_held():
            getattr(iterator, "_shutdown_workers", lambda: None)()


@contextmanager
def _ctrl_c_held() -> Iterator[None]:
    """Put Ctrl-C off while workers start or end; half started, they would leave semaphores and tracebacks behind.

    Processes started inside inherit the blocked signal for good: on Ctrl-C this one stops them, in peace.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    # Blocking alone does not do here: another thread (OpenMP's, say) may take the signal, and the main one raise it.
    caught: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    before = _block_sigint()
    try:
        yield
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        if caught:
            signal.raise_signal(signal.SIGINT)


def _block_sigint() -> set[int] | None:
    """The signals blocked before; None on Windows, which knows no blocking."""
    if not hasattr(signal, "pthread_sigmask"):
        return None
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}))


def _to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on the device; on the CPU it is where it should be."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [_to_device(value, device) for value in batch]
    return batch
