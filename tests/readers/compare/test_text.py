"""The report in words: every number is where it belongs, and no gain is said as plainly as a gain."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from readers.compare.report import ArmFigures, CacheTable, CompareReport, Quartiles
from readers.compare.runs import Run
from readers.compare.stages import Stages
from readers.compare.text import dropped_lines, memory_line, verdict_lines
from readers.page_cache import Dropped, drop_files


def figures(name: str, rates: list[float], stages: Stages, dropped: Dropped | None = None) -> ArmFigures:
    return ArmFigures(name, tuple(Run(0.5, round(rate * 2), 2.0, 1.9) for rate in rates), stages, dropped)


def report(*tables: CacheTable, load: float = 0.1, **settings: Any) -> CompareReport:
    return CompareReport(
        arms=tuple(
            {"name": name, "kind": kind, "root": f"/data/{name}", "storage": {}, "checksum": "00"}
            for name, kind in (("files", "files"), ("out", "hdf5"))
        ),
        images={"in_set": 5000, "measured": 1000, "checked": 64, "bytes": 5 * 2**20},
        settings={"num_workers": 0, "batch_size": 8, "device": "cpu", "seed": 0, "repeats": 3, "transform": "T"}
        | settings,
        shared_memory={"needed_bytes": 0, "free_bytes": None},
        machine={"machine": {"usable_cores": 2, "load": load}},
        tables=tables,
    )


def test_a_ratio_below_1_is_printed() -> None:
    """Case 104: no gain, honestly reported, with the numbers that explain it."""
    table = CacheTable(
        "warm",
        (
            figures("files", [100, 101, 99], Stages(0.05, 1.25, 0.15)),
            figures("out", [90, 91, 89], Stages(0.02, 1.25, 0.15)),
            figures("more", [100, 101, 99], Stages(0.02, 1.25, 0.15)),
        ),
    )
    text = "\n".join(report(table).lines())
    assert "  out       90 (90-90)   0.90  0.50 (0.50-0.50)     0.020       1.250          0.150" in text
    assert "out: slower than files, ratio 0.90; reading an image takes 0.02 ms instead of 0.05 ms\n" in text
    assert "more: no clear difference from files, ratio 1.00, within the spread of the runs; reading" in text
    assert "decoding binds, not storage: with the transform 1.40 ms of 1.45 ms an image from files" in text
    assert "Shards change the reading only: at most 1.04 times the rate" in text
    assert "1 process, one a core, could load 690 images/s; measured from files: 100 (14%), 95% of the time" in text
    assert "The rest goes into handing batches over, or other load" in text


def test_what_makes_rates_rough_is_noted() -> None:
    steady = CacheTable("warm", (figures("files", [100], Stages(1, 1, 1)),))
    short = CacheTable("warm", (ArmFigures("files", (Run(0.5, 10, 0.4, 0.4),), Stages(1, 1, 1)),))
    assert not [line for line in report(steady).lines() if line.startswith("note")]
    assert "note: runs of 0.40 s give rough rates" in "\n".join(report(short).lines())
    assert "(load 9.0 on 2 cores)" in report(steady, load=9.0).lines()[-1]
    few = report(steady, num_workers=4, batch_size=100, prefetch_factor=2, start_method="fork")
    assert "note: 10 batches for 4 workers give rough rates" in few.lines()[-1]


def test_copying_to_the_device_is_stated() -> None:
    steady = CacheTable("warm", (figures("files", [100], Stages(1, 1, 1)),))
    assert "to cuda, pinned and non_blocking, copying included" in report(steady, device="cuda").lines()[1]


def test_storage_binds_where_it_does() -> None:
    slow = figures("files", [100], Stages(9.0, 0.5, 0.5))
    assert "reading binds: 9.00 ms of 10.00 ms" in verdict_lines(CacheTable("warm", (slow,)), 1)[0]
    # With several readers at one disk the stages of a single one do not show it: the loss against warm does.
    warm = CacheTable("warm", (figures("files", [400], Stages(0.1, 0.5, 0.5)),))
    cold = CacheTable("cold", (figures("files", [100], Stages(0.4, 0.5, 0.5)),))
    said = verdict_lines(cold, 2, warm)[0]
    assert said.startswith("Cold cache: reading binds: files load at 100 images/s, at 400 with a warm cache, so 75% of")


def test_quartiles() -> None:
    value = Quartiles.of([1, 2, 3, 4, 5])
    assert (value.p25, value.median, value.p75) == (2, 3, 4)
    assert value.overlaps(Quartiles.of([4]))
    assert not value.overlaps(Quartiles.of([4.5]))


def test_too_little_shared_memory_is_said_before_it_fails() -> None:
    """Case 36: workers x prefetch x bytes of a batch."""
    sizes = {"num_workers": 4, "prefetch_factor": 2}
    line = memory_line(sizes, {"needed_bytes": 80 * 2**20, "free_bytes": 64 * 2**20})
    assert line.startswith(
        "shared memory: 4 workers x 2 batches x 10.0 MiB = 80.0 MiB, /dev/shm has 64.0 MiB free: TOO"
    )
    assert "TOO" not in memory_line(sizes, {"needed_bytes": 80 * 2**20, "free_bytes": None})


@pytest.mark.skipif(sys.platform != "linux", reason="drops the page cache")
def test_what_stays_in_memory_is_called_not_cold() -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no /dev/shm")
    path = memory / f"shardpack-test-{os.getpid()}"
    try:
        path.write_bytes(b"x" * 10_000)
        dropped = drop_files([str(path)])
    finally:
        path.unlink()
    assert (dropped.files, dropped.bytes, dropped.cached_share) == (1, 10_000, 1.0)
    stages = Stages(1, 1, 1)
    table = CacheTable("cold", (figures("files", [1], stages, dropped),))
    assert dropped_lines(table)[1].endswith(
        "100.0% still in memory (in use, not yet written, or a file system in memory): NOT COLD"
    )
