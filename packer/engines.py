"""Where the work runs: this process, a pool of processes, or any ``concurrent.futures.Executor``."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from typing import Any, Final

from .errors import PackError
from .shard import ShardJob, pack_shard

__all__ = ["prepare", "refuse_unguarded_script", "run_shards"]

_TRIES: Final = 3
_POLL_SECONDS: Final = 0.2

#: Called with (shard number, receipt) as shards finish.
Done = Callable[[int, dict[str, Any]], None]
Advance = Callable[[int, int], None]


def run_shards(
    job: ShardJob,
    numbers: Iterable[int],
    workers: int,
    done: Done,
    advance: Advance,
    executor: Executor | None = None,
) -> None:
    """Pack shards, in any order, until all are done or one fails.

    Raises:
        PackError: A shard failed, or its worker died three times.
    """
    pending = list(numbers)
    if executor is not None:
        _drain(lambda number: executor.submit(_pack_alone, job, number), pending, workers, done, None)
    elif workers == 1 or len(pending) == 1:
        for number in pending:
            done(number, pack_shard(job, number, advance))
    else:
        _run_pool(job, pending, min(workers, len(pending)), done, advance)


def _run_pool(job: ShardJob, pending: list[int], workers: int, done: Done, advance: Advance) -> None:
    tries: dict[int, int] = {}
    while pending:
        # One at a time after a death: only so is it known which shard kills.
        width = workers if not tries else 1
        batch = pending if not tries else pending[:1]
        finished: set[int] = set()

        def note(number: int, receipt: dict[str, Any], finished: set[int] = finished) -> None:
            finished.add(number)
            done(number, receipt)

        try:
            with _Pool(job, batch, width, advance) as pool:
                _drain(pool.submit, batch, width, note, pool.report)
        except BrokenProcessPool as error:
            suspects = [number for number in batch if number not in finished][: width * 2]
            for number in suspects:
                tries[number] = tries.get(number, 0) + 1
            worst = max(suspects, key=lambda number: tries[number])
            if tries[worst] >= _TRIES and width == 1:
                raise PackError(
                    f"the worker that packs shard {worst} died {_TRIES} times (out of memory? or a script that calls "
                    'pack() without `if __name__ == "__main__":`). '
                    "All finished shards are kept; rerun the same command to continue"
                ) from error
            pending = suspects + [n for n in pending if n not in finished and n not in suspects]
        else:
            for number in finished:
                tries.pop(number, None)
            pending = [number for number in pending if number not in finished]


def _drain(
    submit: Callable[[int], Future[dict[str, Any]]],
    numbers: list[int],
    workers: int,
    done: Done,
    report: Callable[[], None] | None,
) -> None:
    """Keep ``2 * workers`` shards submitted and hand on what finishes."""
    waiting = iter(numbers)
    flying: dict[Future[dict[str, Any]], int] = {}
    while True:
        while len(flying) < 2 * workers and (number := next(waiting, None)) is not None:
            flying[submit(number)] = number
        if not flying:
            return
        finished, _ = wait(flying, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        if report is not None:
            report()
        for future in finished:
            done(flying.pop(future), future.result())


def _pack_alone(job: ShardJob, number: int) -> dict[str, Any]:
    return pack_shard(job, number, lambda files, size: None)


class _Pool:
    """A process pool whose workers count what they have done, and die with their parent."""

    def __init__(self, job: ShardJob, numbers: list[int], workers: int, advance: Advance) -> None:
        context = _context()
        self._job = job
        self._advance = advance
        self._slots = {number: slot for slot, number in enumerate(numbers)}
        # Two counters a shard, each written by one worker only: no lock that a killed worker could keep.
        self._counts = context.RawArray("Q", 2 * len(numbers))
        self._seen = (0, 0)
        self._before = set(multiprocessing.active_children())
        self._executor = ProcessPoolExecutor(workers, context, _start_worker, (self._counts,))

    def submit(self, number: int) -> Future[dict[str, Any]]:
        try:
            return self._executor.submit(_pack_counted, self._job, number, self._slots[number])
        except BrokenProcessPool:
            raise
        except (OSError, RuntimeError) as error:  # the pool is just coming down over a dead worker
            raise BrokenProcessPool(str(error)) from error

    def report(self) -> None:
        """Hand on what the workers have counted since the last time."""
        files, size = sum(self._counts[0::2]), sum(self._counts[1::2])
        self._advance(max(0, files - self._seen[0]), max(0, size - self._seen[1]))
        self._seen = (files, size)

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # Nothing half-way is worth finishing: what is published stays, the rest is made again.
            for process in set(multiprocessing.active_children()) - self._before:
                process.kill()
        self._executor.shutdown(cancel_futures=True)
        if kind is None:
            self.report()


def _context() -> BaseContext:
    # fork would copy the locks of this process's threads; spawn works everywhere, forkserver starts faster.
    prepare()
    has_forkserver = "forkserver" in multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if has_forkserver else "spawn")


def refuse_unguarded_script() -> None:
    """Stop a worker that, importing the user's script, has come upon its call of ``pack`` again."""
    # The flag that multiprocessing itself asks for before it starts a process (spawn._check_not_importing_main).
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(
            'pack() must be called under `if __name__ == "__main__":`, since its workers import the script'
        )


def prepare() -> None:
    """Let the process that workers are forked from start and import what they need, while this one scans.

    SIGINT is blocked in it: workers must not die of a Ctrl-C before they can ignore it.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload([pack_shard.__module__])
    resource_tracker.ensure_running()  # first: when it has started, it unblocks SIGINT itself
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


_worker_counts: Any = None


def _start_worker(counts: Any) -> None:
    global _worker_counts
    _worker_counts = counts
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: Any) -> None:
    """A pool's workers outlive a killed parent and would write on beside its successor."""
    parent.join()
    os._exit(1)


def _pack_counted(job: ShardJob, number: int, slot: int) -> dict[str, Any]:
    def count(files: int, size: int) -> None:
        _worker_counts[2 * slot] += files
        _worker_counts[2 * slot + 1] += size

    _worker_counts[2 * slot] = _worker_counts[2 * slot + 1] = 0
    return pack_shard(job, number, count)
