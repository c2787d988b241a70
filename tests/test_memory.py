"""Memory: flat in every worker, and the same for a thousand records and a hundred million."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from torch.utils.data import Dataset

from packer.items import Record
from packer.publish import PrivateFile
from packer.writers import WRITERS
from readers import Manifest, ShardDataset, shard_loader
from readers.layout import shard_name

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores, on purpose
]

MIB = 1 << 20
SHARDS = 20
RECORDS_A_SHARD = 100_000


def write_set(root: Path, container: str, records: Iterable[tuple[bytes, bytes, int]], shards: int) -> Path:
    """One shard of these records, and hard links to it: millions of records in a second."""
    first = root / shard_name(0, container)
    first.parent.mkdir(parents=True)
    private = PrivateFile(str(first.parent), 0o644)
    writer = WRITERS[container](private)
    for image, key, label in records:
        writer.add(Record(image, key, label, 0, 0, 0, 0, 0, 0))
    done = writer.finish()
    private.publish(str(first))
    for number in range(1, shards):
        os.link(first, root / shard_name(number, container))
    manifest = make_manifest(
        container, [done.records] * shards, [first.stat().st_size] * shards, done.shard_id,
        blake3(first.read_bytes()).hexdigest(),
    )  # fmt: skip
    (root / "manifest.json").write_bytes(manifest.to_bytes())
    return root


def make_manifest(container: str, records: list[int], sizes: list[int], shard_id: str, file_hash: str) -> Manifest:
    return Manifest(
        container=container,
        classes=("a",),
        class_counts=(sum(records),),
        records=sum(records),
        rejected=0,
        options={},
        source={},
        created_by="tests",
        shard_records=tuple(records),
        shard_bytes=tuple(sizes),
        shard_ids=(shard_id,) * len(records),
        shard_blake3s=(file_hash,) * len(records),
    )


def private_bytes() -> int:
    """Private memory of this process: clean pages of mapped files, which the kernel may take back, do not count."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))


class Measured(Dataset[Any]):
    """A dataset's samples, batch by batch as one row: worker, samples, bytes, and the worker's private memory."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset
        self._batches = 0
        self._private = 0

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> tuple[int, int, int, int]:
        if self._batches == 0:
            # Python's own collector writes into every object it inherited (torch's modules: 40 MB), once.
            gc.collect()
        if self._batches % 10 == 0:  # looking is dear: the kernel walks all page tables
            self._private = private_bytes()
        self._batches += 1
        samples = self._dataset.__getitems__(indices)
        size = sum(len(sample.image) for sample in samples)
        return os.getpid(), len(samples), size, self._private


def growth(rows: list[tuple[int, int, int, int]]) -> list[int]:
    """Of each worker: private bytes at its last batch above those early in the epoch."""
    of: dict[int, list[int]] = {}
    for pid, _, _, private in rows:
        of.setdefault(pid, []).append(private)
    return [memory[-1] - memory[len(memory) // 20] for memory in of.values()]


def collated(rows: Any) -> Any:
    return rows


def test_private_memory_of_eight_workers_is_flat_over_two_million_records(container: str, tmp_path: Path) -> None:
    """Copies of a list of paths, touched by every look at its reference counts, are what fills machines elsewhere."""
    records = ((b"%d" % (n % 10_000), b"k%d" % n, 0) for n in range(RECORDS_A_SHARD))
    dataset = ShardDataset(write_set(tmp_path / "set", container, records, SHARDS), decode="bytes")
    assert len(dataset) == 2_000_000
    loader = shard_loader(
        Measured(dataset), 1000, shuffle=True, num_workers=8, multiprocessing_context="fork", collate_fn=collated,
        timeout=120,
    )  # fmt: skip
    rows = list(loader)
    assert sum(count for _, count, _, _ in rows) == 2_000_000
    assert sum(size for _, _, size, _ in rows) == 20 * sum(len(str(n % 10_000)) for n in range(RECORDS_A_SHARD))
    grown = growth(rows)
    assert len(grown) == 8
    assert max(grown) < 20 * MIB, [size / MIB for size in grown]
    del loader


def test_case_4_private_memory_is_flat_from_the_second_epoch_on(container: str, tmp_path: Path) -> None:
    """200 shards, 2 persistent workers, 5 shuffled epochs."""
    records = ((os.urandom(2000), b"k%d" % n, 0) for n in range(50))
    dataset = ShardDataset(write_set(tmp_path / "set", container, records, 200), decode="bytes")
    loader = shard_loader(
        Measured(dataset), 100, shuffle=True, num_workers=2, multiprocessing_context="fork", collate_fn=collated,
        timeout=120,
    )  # fmt: skip
    epochs: list[dict[int, int]] = []
    for _ in range(5):
        rows = list(loader)
        assert sum(count for _, count, _, _ in rows) == 10_000
        epochs.append({pid: private for pid, _, _, private in rows})
    assert len(epochs[1]) == 2
    for pid, private in epochs[1].items():
        assert epochs[4][pid] < private * 1.1
    del loader


def test_case_27_reading_a_set_leaves_no_private_memory(container: str, tmp_path: Path) -> None:
    """Resident memory may grow by pages of the files; memory of our own must not."""
    records = ((os.urandom(50_000), b"k%d" % n, 0) for n in range(1000))
    dataset = ShardDataset(write_set(tmp_path / "set", container, records, 4), decode="bytes")
    for index in range(100):
        dataset[index]
    before = private_bytes()
    read = sum(len(dataset[index].image) for index in range(len(dataset)))
    assert read == 200_000_000
    assert private_bytes() - before < 20 * MIB


def test_samples_and_targets_keep_nothing(container: str, tmp_path: Path) -> None:
    records = ((b"i", b"k%06d" % n, 0) for n in range(RECORDS_A_SHARD))
    dataset = ShardDataset(write_set(tmp_path / "set", container, records, 2), decode="bytes")
    assert dataset.samples[0] == ("k000000", 0)
    tracemalloc.start()
    for index in range(0, 200_000, 97):
        assert dataset.samples[index][1] == 0
    assert len(dataset.targets) == 200_000
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 200_000
    assert peak < 200_000 * 8 * 4 + 6 * MIB


# -- the constructor


@pytest.fixture(scope="module")
def of_size(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """``of_size(records) -> root``: a set of 200 shards with so many records each; the files are holes."""

    def make(records_a_shard: int) -> Path:
        root = tmp_path_factory.mktemp("sized")
        manifest = make_manifest("hdf5", [records_a_shard] * 200, [records_a_shard * 1000] * 200, "0" * 32, "0" * 64)
        first = root / shard_name(0, "hdf5")
        first.parent.mkdir(parents=True)
        first.touch()
        os.truncate(first, records_a_shard * 1000)
        for number in range(1, 200):
            os.link(first, root / shard_name(number, "hdf5"))
        (root / "manifest.json").write_bytes(manifest.to_bytes())
        return root

    return make


SIZES = (5, 500_000)  # times 200 shards: a thousand, and a hundred million


def test_constructor_does_the_same_work_for_a_thousand_and_for_a_hundred_million(
    of_size: Callable[[int], Path],
) -> None:
    def calls(root: Path) -> Counter[str]:
        made: Counter[str] = Counter()

        def note(frame: Any, event: str, argument: Any) -> None:
            if event in ("call", "c_call"):
                made[getattr(argument, "__name__", frame.f_code.co_name)] += 1

        ShardDataset(root)
        sys.setprofile(note)
        try:
            dataset = ShardDataset(root)
            length = len(dataset)
        finally:
            sys.setprofile(None)
        made["length"] = length
        return made

    small, large = (calls(of_size(size)) for size in SIZES)
    assert (small.pop("length"), large.pop("length")) == (1000, 100_000_000)
    assert small == large
    assert small["stat"] == 200 + 2, "one look at each shard, two at the manifest, no shard opened"
    assert small["open"] == 1, "the manifest"


def test_constructor_takes_the_same_memory_for_a_thousand_and_for_a_hundred_million(
    of_size: Callable[[int], Path],
) -> None:
    def memory(root: Path) -> tuple[int, int]:
        ShardDataset(root)
        tracemalloc.start()
        dataset = ShardDataset(root)
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert dataset is not None
        return kept, peak

    (small_kept, small_peak), (large_kept, large_peak) = (memory(of_size(size)) for size in SIZES)
    assert large_kept < small_kept + 30_000  # numbers above 2**30 take four bytes more
    assert large_peak < small_peak + 60_000
    assert large_kept < MIB


def test_pickle_is_as_small_for_a_hundred_million(of_size: Callable[[int], Path]) -> None:
    small, large = (len(pickle.dumps(ShardDataset(of_size(size)))) for size in SIZES)
    assert abs(small - large) < 16
    assert large < 4096


def test_pickle_after_use_of_two_million_records(tmp_path: Path) -> None:
    records = ((b"i", b"k%d" % n, 0) for n in range(RECORDS_A_SHARD))
    dataset = ShardDataset(write_set(tmp_path / "set", "hdf5", records, SHARDS), decode="bytes")
    for index in range(0, 2_000_000, 50_001):
        dataset[index]
    assert len(dataset.targets) == 2_000_000
    data = pickle.dumps(dataset)
    assert len(data) < 4096
    assert pickle.loads(data)[1_999_999].image == b"i"


def test_many_threads_open_one_handle(tmp_path: Path) -> None:
    """Private memory does not depend on how many threads read."""
    records = ((os.urandom(1000), b"k%d" % n, 0) for n in range(2000))
    dataset = ShardDataset(write_set(tmp_path / "set", "lmdb", records, 10), decode="bytes")

    def read(start: int) -> None:
        for index in range(start, 20_000, 16):
            dataset[index]

    read(0)
    before = private_bytes()
    threads = [threading.Thread(target=read, args=(start,)) for start in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert private_bytes() - before < 20 * MIB
