"""Packing: against GNU tar to a file and sync, and against decoding the same files and doing nothing else.

python scripts/bench/pack.py --work /tmp/bench
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import click
from inputs import images
from PIL import Image
from runner import Arm, Result, alternate, report


@click.command()
@click.option("--work", default="out/bench", show_default=True, help="Folder for images and sets; kept.")
@click.option("--count", default=100_000, show_default=True, help="Images.")
@click.option("--bytes", "mean_bytes", default=5120, show_default=True, help="Mean size of an image.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--json", "json_path", type=click.Path())
def main(work: str, count: int, mean_bytes: int, repeats: int, json_path: str | None) -> None:
    """Measure `pack --check none` with one worker and `--check decode` with two."""
    os.makedirs(work, exist_ok=True)
    source = images(work, count, mean_bytes)
    results = [against_tar(source, work, count, repeats), against_decoding(source, work, count, repeats)]
    report(results, work, json_path)


def against_tar(source: str, work: str, count: int, repeats: int) -> Result:
    """Copying is all there is to do: how near to tar?"""
    arms: dict[str, Arm] = {"tar, then sync": lambda: run_tar(source, work, count)}
    for container in ("hdf5", "lmdb"):
        words = ["--format", container, "--check", "none", "--workers", "1"]
        arms[f"pack {' '.join(words)}"] = lambda words=words: run_pack(source, work, count, words)  # type: ignore[misc]
    return alternate("packing without a check", arms, repeats=repeats, count=count)


def against_decoding(source: str, work: str, count: int, repeats: int) -> Result:
    """Decoding is nearly all there is to do: what does the rest cost?"""
    paths = sorted(os.path.join(folder, name) for folder, _, names in os.walk(source) for name in names)
    paths = [path for path in paths if path.endswith(".jpg")]
    words = ["--check", "decode", "--workers", "2"]
    arms: dict[str, Arm] = {
        "bare decode, 2 processes": lambda: bare_decode(paths),
        f"pack {' '.join(words)}": lambda: run_pack(source, work, count, words),
    }
    return alternate("packing with the decode check", arms, repeats=repeats, count=count)


def run_tar(source: str, work: str, count: int) -> int:
    target = os.path.join(work, "bench.tar")
    subprocess.run(["tar", "cf", target, "-C", source, "."], check=True)
    subprocess.run(["sync"], check=True)
    os.unlink(target)
    return count


def run_pack(source: str, work: str, count: int, words: list[str]) -> int:
    target = os.path.join(work, "bench-packed")
    subprocess.run([sys.executable, "-m", "packer", source, target, "--quiet", *words], check=True)
    shutil.rmtree(target)
    return count


def bare_decode(paths: list[str]) -> int:
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        return sum(pool.map(decode_all, [paths[: len(paths) // 2], paths[len(paths) // 2 :]]))


def decode_all(paths: list[str]) -> int:
    for path in paths:
        with Image.open(path) as image:
            image.load()
    return len(paths)


if __name__ == "__main__":
    main()
