"""Random record reads, as bytes, CRC checked, in one process: loose files against shards.

python scripts/bench/read.py --work /tmp/bench
"""

from __future__ import annotations

import os
import random

import click
import google_crc32c
from inputs import images, packed
from runner import Arm, Result, alternate, report

from readers import ShardDataset
from readers.handles import open_shard

BATCH = 256


@click.command()
@click.option("--work", default="out/bench", show_default=True, help="Folder for images and sets; kept.")
@click.option("--count", default=100_000, show_default=True, help="Images.")
@click.option("--bytes", "mean_bytes", default=5120, show_default=True, help="Mean size of an image.")
@click.option("--reads", default=204_800, show_default=True, help="Reads a run: over a second for every arm.")
@click.option("--repeats", default=7, show_default=True)
@click.option("--json", "json_path", type=click.Path())
def main(work: str, count: int, mean_bytes: int, reads: int, repeats: int, json_path: str | None) -> None:
    """Measure warm random reads, and the same over many shards with few descriptors."""
    os.makedirs(work, exist_ok=True)
    source = images(work, count, mean_bytes)
    results = [against_files(source, count, reads, repeats)]
    results += [many_shards(source, container, count, reads, repeats) for container in ("hdf5", "lmdb")]
    report(results, work, json_path)


def against_files(source: str, count: int, reads: int, repeats: int) -> Result:
    """open().read() on the loose files, ``dataset[i]``, and ``__getitems__`` of 256."""
    order = random.Random(0).choices(range(count), k=reads)
    sets = {name: ShardDataset(packed(source, name), decode="bytes") for name in ("hdf5", "lmdb")}
    any_set = sets["hdf5"]
    paths = [os.path.join(source, any_set.key(index)) for index in range(count)]
    arms: dict[str, Arm] = {"open().read()": lambda: read_files(paths, order)}
    for name, dataset in sets.items():
        arms[f"{name} dataset[i]"] = lambda dataset=dataset: read_items(dataset, order)  # type: ignore[misc]
    for name, dataset in sets.items():
        arms[f"{name} __getitems__ of {BATCH}"] = lambda dataset=dataset: read_batches(dataset, order)  # type: ignore[misc]
    plan = places(any_set)
    arms["bare loop of pread and CRC-32C"] = lambda: read_places(plan, order)
    return alternate("random reads", arms, repeats=repeats, count=count, reads=reads)


def many_shards(source: str, container: str, count: int, reads: int, repeats: int) -> Result:
    """The same reads over 6 shards and over 600, with at most 256 open files."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    order = random.Random(0).choices(range(count), k=reads)
    sets = {
        shards: ShardDataset(packed(source, container, shard_records=-(-count // shards)), decode="bytes")
        for shards in (6, 600)
    }
    arms: dict[str, Arm] = {}
    for shards, dataset in sets.items():
        arms[f"{container}, {shards} shards, dataset[i]"] = lambda dataset=dataset: read_items(dataset, order)  # type: ignore[misc]
    for shards, dataset in sets.items():
        arms[f"{container}, {shards} shards, __getitems__"] = lambda dataset=dataset: read_batches(dataset, order)  # type: ignore[misc]
    return alternate(f"256 descriptors, {container}", arms, repeats=repeats, count=count, reads=reads)


def read_files(paths: list[str], order: list[int]) -> int:
    for index in order:
        with open(paths[index], "rb") as file:
            file.read()
    return len(order)


def places(dataset: ShardDataset) -> list[tuple[int, int, int, int]]:
    """(descriptor, offset, length, CRC-32C) of every image: the least that checked reading can cost starts here."""
    found = []
    for number in range(len(dataset.manifest.shard_ids)):
        path = dataset.manifest.shard_path(dataset.root, number)
        shard = open_shard(dataset.root, dataset.manifest, number)
        rows = shard.rows()
        offsets = rows["image_offset"].astype(int) + shard.values_offset
        columns = (offsets.tolist(), rows["image_length"].tolist(), rows["image_crc32c"].tolist())
        fd = os.open(path, os.O_RDONLY)  # left open until the end of the run
        found += [(fd, *place) for place in zip(*columns, strict=True)]
    return found


def read_places(plan: list[tuple[int, int, int, int]], order: list[int]) -> int:
    for index in order:
        fd, offset, length, crc = plan[index]
        if google_crc32c.value(os.pread(fd, length, offset)) != crc:
            raise SystemExit("a checksum does not match")
    return len(order)


def read_items(dataset: ShardDataset, order: list[int]) -> int:
    for index in order:
        dataset[index]
    return len(order)


def read_batches(dataset: ShardDataset, order: list[int]) -> int:
    for start in range(0, len(order), BATCH):
        dataset.__getitems__(order[start : start + BATCH])
    return len(order)


if __name__ == "__main__":
    main()
