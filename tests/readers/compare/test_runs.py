"""One timed run: what is on the clock, and what is not (with a clock that the test moves)."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from readers.compare.options import CompareOptions, CompareUsageError
from readers.compare.runs import Run, RunSettings, _ctrl_c_held, time_run


class Clock:
    """A clock that moves only when told to."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class SlowStart(Dataset[Any]):
    """The first image takes 100 s, every other one 0.5 s."""

    def __init__(self, clock: Clock, images: int) -> None:
        self.clock, self.images = clock, images

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.seconds += 100 if index == 0 else 0.5
        return torch.zeros(1)


def settings(**changes: Any) -> RunSettings:
    values = {
        "batch_size": 4,
        "workers": 0,
        "prefetch_factor": 2,
        "device": torch.device("cpu"),
        "start_method": "fork",
        "timeout_seconds": 60.0,
        "max_seconds": 1000.0,
    }
    return RunSettings(**(values | changes))


def test_start_up_is_in_the_first_figure_only() -> None:
    """Case 102."""
    clock = Clock()
    run = time_run(SlowStart(clock, 22), 22, settings(clock=clock))
    assert run == Run(first_batch_seconds=101.5, images=18, steady_seconds=9.0, wait_seconds=9.0)
    assert run.images_per_second == 2.0


def test_a_run_stops_after_its_seconds() -> None:
    clock = Clock()
    run = time_run(SlowStart(clock, 400), 400, settings(clock=clock, max_seconds=5.0))
    assert (run.images, run.steady_seconds) == (12, 6.0)  # the first whole batch past 5 s


def test_batches_of_any_shape_go_to_the_device() -> None:
    clock = Clock()

    class Nested(SlowStart):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            return {"image": torch.zeros(2), "more": (torch.zeros(1), "text")}

    run = time_run(Nested(clock, 8), 8, settings(clock=clock, device=torch.device("meta")))
    assert run.images == 4


def test_ctrl_c_is_not_lost_while_workers_start_or_end() -> None:
    finished = []

    def start_workers() -> None:
        with _ctrl_c_held():
            signal.raise_signal(signal.SIGINT)
            finished.append(True)

    with pytest.raises(KeyboardInterrupt):
        start_workers()
    assert finished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_rate_is_steady_after_one_batch_of_each_worker() -> None:
    assert settings(workers=0).lead(400) == 1
    assert settings(workers=8).lead(400) == 8
    assert settings(workers=8).lead(20) == 2  # 5 batches: at least half of them are measured


def test_default_batches_leave_every_worker_several() -> None:
    options = CompareOptions(num_workers=4)
    assert [options.batch_for(images) for images in (20_000, 160, 3)] == [64, 10, 1]
    with pytest.raises(CompareUsageError, match="a set with more images"):
        options.batch_for(1)
