"""Packing needs the same memory for ten thousand images and for a hundred thousand, whatever the shard's size."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see peak memory"),
]

MIB = 2**20


@pytest.fixture(scope="module")
def tiny_images(tmp_path_factory: pytest.TempPathFactory, draw_image: Callable[..., bytes]) -> Callable[[int], Path]:
    """A folder of so many tiny images in 20 classes: links to one of 20 files each."""
    base = tmp_path_factory.mktemp("tiny")

    def make(count: int) -> Path:
        root = base / str(count)
        for label in range(20):
            folder = root / f"class_{label:02d}"
            folder.mkdir(parents=True)
            first = folder / "image_0000000.jpg"
            first.write_bytes(draw_image(label))
            for number in range(1, count // 20):
                os.link(first, folder / f"image_{number:07d}.jpg")
        return root

    return make


@pytest.fixture(scope="module")
def few(tiny_images: Callable[[int], Path]) -> Path:
    return tiny_images(10_000)


@pytest.fixture(scope="module")
def many(tiny_images: Callable[[int], Path]) -> Path:
    return tiny_images(100_000)


def peak_bytes(source: Path, out: Path, *words: str) -> int:
    """Largest resident memory of any process of a run.

    VmHWM, asked for again and again: it begins anew at exec, whereas ru_maxrss still holds the memory of this
    process, from which the run was forked.
    """
    command = [sys.executable, "-m", "packer", os.fspath(source), os.fspath(out), "--quiet", *words]
    peak = 0
    with psutil.Popen(command) as process:
        while process.poll() is None:
            peak = max(peak, high_water_bytes(process), *map(high_water_bytes, process.children(recursive=True)))
            time.sleep(0.005)
    assert process.returncode == 0
    assert peak > 20 * MIB, "nothing was measured"
    return peak


def high_water_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process.pid}/status").read_text()
        kib = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(kib[1]) * 1024 if kib else 0
    return 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_case_92_memory_does_not_grow_with_the_set(
    few: Path, many: Path, tmp_path: Path, container: str, workers: str
) -> None:
    # Shards of 2,000 records: many of them, also in the small set.
    words = ("--format", container, "--workers", workers, "--check", "none", "--shard-records", "2000")
    assert peak_bytes(many, tmp_path / "many", *words) <= 1.15 * peak_bytes(few, tmp_path / "few", *words)


def test_case_92_memory_of_one_huge_shard(many: Path, tmp_path: Path, container: str) -> None:
    words = ("--format", container, "--workers", "1", "--shard-size", "4GiB")
    assert peak_bytes(many, tmp_path / "out", *words) <= 150 * MIB + 64 * 100_000


def test_case_92_memory_of_a_stored_shuffle(many: Path, tmp_path: Path) -> None:
    words = ("--workers", "1", "--check", "none", "--shuffle", "1")
    assert peak_bytes(many, tmp_path / "many", *words) <= 150 * MIB
