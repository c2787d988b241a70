"""Reading in DataLoader workers under every start method, and beside everything else a process may do."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, get_worker_info

from packer import PackOptions, pack
from readers import ShardDataset, shard_loader
from readers.layout import shard_name

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores, on purpose

COUNT = 60
HANG_SECONDS = 60
#: (workers, start method); spawn and forkserver import torch anew in every worker.
STARTS = [
    pytest.param(0, None, id="0"),
    pytest.param(2, "fork", id="2-fork"),
    pytest.param(2, "spawn", id="2-spawn", marks=pytest.mark.slow),
    pytest.param(2, "forkserver", id="2-forkserver", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory, make_tree: Callable[..., Path]) -> dict[str, Path]:
    """60 pictures of one colour, which tells their index; shards of eight."""
    import io

    from PIL import Image

    folder = tmp_path_factory.mktemp("workers")
    files = {}
    for number in range(COUNT):
        file = io.BytesIO()
        Image.new("RGB", (3, 2), (number, 255 - number, number // 2)).save(file, "PNG")
        files[f"{'abc'[number // 20]}/{number:02d}.png"] = file.getvalue()
    source = make_tree(folder / "source", files)
    for name in ("hdf5", "lmdb"):
        pack(source, folder / name, PackOptions(format=name, workers=1, shard_records=8))
    return {name: folder / name for name in ("hdf5", "lmdb")}


@pytest.fixture
def root(sets: dict[str, Path], container: str) -> Path:
    return sets[container]


def right(index: int, image: torch.Tensor, target: int) -> bool:
    return image[:, 0, 0].tolist() == [index, 255 - index, index // 2] and int(target) == index // 20


def read_right(loader: Any) -> list[int]:
    """Read an epoch of (images, targets, indices) batches, check every sample, return the indices."""
    seen = []
    for images, targets, indices in loader:
        for image, target, index in zip(images, targets, indices.tolist(), strict=True):
            assert right(index, image, target)
            seen.append(index)
    return seen


def open_set(root: Path, **options: Any) -> ShardDataset:
    return ShardDataset(root, **({"decode": "tensor", "extras": ("index",)} | options))


def loader_of(dataset: Any, workers: int, start: str | None, **options: Any) -> DataLoader[Any]:
    if workers:
        options = {"timeout": HANG_SECONDS, "multiprocessing_context": start} | options
    return shard_loader(dataset, options.pop("batch_size", 7), num_workers=workers, **options)


# -- start methods (cases 1, 15, 50)


@pytest.mark.parametrize(("workers", "start"), STARTS)
def test_case_1_and_50_parent_reads_before_while_and_after_its_workers(
    root: Path, workers: int, start: str | None
) -> None:
    dataset = open_set(root)
    assert right(5, *dataset[5][:2])
    assert dataset.targets.sum() == 60
    loader = loader_of(dataset, workers, start, shuffle=True)
    for _ in range(2):
        seen = []
        for batch in loader:
            seen += read_right([batch])
            beside = (seen[-1] + 30) % COUNT
            assert right(beside, *dataset[beside][:2])
        assert sorted(seen) == list(range(COUNT))
        assert right(59, *dataset[-1][:2])
    del loader


@pytest.mark.parametrize(("workers", "start"), STARTS)
def test_two_datasets_over_one_set_in_the_same_workers(root: Path, workers: int, start: str | None) -> None:
    first, second = open_set(root), open_set(root)
    assert right(0, *first[0][:2])
    both = ConcatDataset([first, Subset(second, range(10))])
    seen = read_right(loader_of(both, workers, start))
    assert sorted(seen) == sorted([*range(COUNT), *range(10)])


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_loaders_at_once(root: Path, persistent: bool) -> None:
    dataset = open_set(root)
    one = loader_of(dataset, 1, "fork", shuffle=True, persistent_workers=persistent)
    other = loader_of(open_set(root), 2, "fork", persistent_workers=persistent)
    for _ in range(2):
        seen = [read_right([a]) + read_right([b]) for a, b in zip(one, other, strict=True)]
        assert sorted(index for batch in seen for index in batch) == sorted([*range(COUNT)] * 2)
    del one, other


def test_pictures_cross_to_the_parent_as_lists(root: Path) -> None:
    dataset = ShardDataset(root, extras=("index",))
    for batch in loader_of(dataset, 2, "fork", collate_fn=list):
        for image, target, index in batch:
            assert image.getpixel((0, 0)) == (index, 255 - index, index // 2)
            assert target == index // 20


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_plain_process_reads_a_dataset_it_is_sent(root: Path, start: str) -> None:
    dataset = open_set(root, decode="bytes")
    expected = dataset[3]
    context = multiprocessing.get_context(start)
    with context.Pool(1) as pool:
        assert pool.apply(dataset.__getitem__, (3,)) == expected
    assert dataset[3] == expected


def test_relative_folder_in_workers(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(root.parent)
    dataset = open_set(Path(root.name))
    monkeypatch.chdir(tmp_path)
    assert sorted(read_right(loader_of(dataset, 1, "fork"))) == list(range(COUNT))


# -- beside plain h5py and plain lmdb


def plain_handles(root: Path, container: str) -> list[Any]:
    paths = [str(root / shard_name(number, container)) for number in (0, 1)]
    if container == "hdf5":
        return [h5py.File(path, "r") for path in paths]
    return [lmdb.open(path, subdir=False, readonly=True, lock=False) for path in paths]


def plain_read(handle: Any) -> bytes:
    if isinstance(handle, h5py.File):
        return bytes(handle["index"][:].tobytes())
    with handle.begin() as txn:
        return bytes(txn.get(b"header"))


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_shard_that_the_user_has_open_with_the_plain_library(root: Path, container: str, first: str) -> None:
    dataset = open_set(root)
    if first == "ours":
        assert right(0, *dataset[0][:2])
    handles = plain_handles(root, container)
    try:
        before = [plain_read(handle) for handle in handles]
        for index in range(COUNT):
            assert right(index, *dataset[index][:2])
        assert sorted(read_right(loader_of(dataset, 2, "fork"))) == list(range(COUNT))
        assert [plain_read(handle) for handle in handles] == before
    finally:
        for handle in handles:
            handle.close()
    assert right(0, *dataset[0][:2])


# -- case 3: fork while a thread reads


@pytest.fixture
def reading_thread() -> Iterator[Callable[[Callable[[], object]], None]]:
    """``reading_thread(read)`` calls ``read`` over and over in a thread until the test ends."""
    stop = threading.Event()
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def start(read: Callable[[], object]) -> None:
        began = threading.Event()

        def loop() -> None:
            try:
                while not stop.is_set():
                    read()
                    began.set()
            except BaseException as error:  # noqa: BLE001  a thread's exception would be lost
                errors.append(error)
                began.set()

        threads.append(threading.Thread(target=loop))
        threads[-1].start()
        assert began.wait(30)

    yield start
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not errors


@pytest.mark.parametrize("what", ["ours", "plain"])
def test_case_3_fork_while_a_thread_of_the_parent_reads(
    root: Path, container: str, what: str, reading_thread: Callable[[Callable[[], object]], None]
) -> None:
    dataset = open_set(root)
    handles = plain_handles(root, container)
    rng = random.Random(0)
    reading_thread((lambda: dataset[rng.randrange(COUNT)]) if what == "ours" else (lambda: plain_read(handles[0])))
    for _ in range(2):
        loader = loader_of(dataset, 4, "fork", shuffle=True, timeout=30, persistent_workers=False)
        assert sorted(read_right(loader)) == list(range(COUNT))
    for handle in handles:
        if what == "ours":
            handle.close()


# -- case 18: short-lived children


def test_case_18_fifty_children_that_only_exit(root: Path) -> None:
    dataset = open_set(root)
    for turn in range(2):
        assert all(right(index, *dataset[index][:2]) for index in range(turn, COUNT, 4))
        children = []
        for _ in range(25):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            children.append(pid)
        assert right(turn, *dataset[turn][:2])
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 25
    assert sorted(read_right(loader_of(dataset, 1, "fork"))) == list(range(COUNT))


def test_case_18_children_that_drop_the_dataset_leave_the_parents_handles_alone(root: Path) -> None:
    dataset = open_set(root)
    list(dataset)
    for read in (False, True):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if not read or right(9, *dataset[9][:2]) else 2
                del dataset
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert all(right(index, *dataset[index][:2]) for index in range(COUNT))


# -- many workers, many epochs


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_case_19_eight_workers_twenty_epochs(
    persistent: bool, tmp_path: Path, make_tree: Callable[..., Path], draw_image: Callable[..., bytes]
) -> None:
    files = {f"{'ab'[n % 2]}/{n:04d}.jpg": draw_image(n, (8, 8)) for n in range(2000)}
    source = make_tree(tmp_path / "source", files)
    pack(source, tmp_path / "set", PackOptions(format="lmdb", workers=1, check="none", shard_records=300))
    dataset = ShardDataset(tmp_path / "set", decode="tensor")
    loader = loader_of(dataset, 8, "fork", batch_size=64, shuffle=True, persistent_workers=persistent)
    started = time.monotonic()
    for _ in range(20):
        batches = list(loader)
        assert len(batches) == len(loader) == 32
        assert sum(int(batch.target.sum()) for batch in batches) == 1000
    assert time.monotonic() - started < 120
    del loader


@pytest.mark.slow
def test_case_22_64_processes_open_and_read_at_once(root: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(64)
    failures = context.Value("i", 0)

    def rank(number: int) -> None:
        for turn in range(20):
            barrier.wait(60)
            index = (number + turn) % COUNT
            if not right(index, *open_set(root)[index][:2]):
                failures.value += 1

    processes = [context.Process(target=rank, args=(number,)) for number in range(64)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 64
    assert failures.value == 0


# -- case 38: random numbers


class Augment:
    """Draws from every generator that people use."""

    def __call__(self, image: Any) -> torch.Tensor:
        info = get_worker_info()
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(info.id if info else -1), *drawn], dtype=torch.float64)


def test_case_38_workers_and_epochs_draw_different_numbers(root: Path) -> None:
    dataset = ShardDataset(root, Augment(), decode="bytes")
    loader = loader_of(dataset, 4, "fork", batch_size=5, persistent_workers=False)
    drawn = torch.cat([images for _ in range(2) for images, _ in loader])
    assert set(drawn[:, 0].tolist()) == {0, 1, 2, 3}
    for column, name in ((1, "random"), (2, "numpy"), (3, "torch")):
        assert len(drawn[:, column].unique()) == 2 * COUNT, f"{name} repeats"


def test_case_38_nothing_of_ours_seeds_or_draws(root: Path) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    dataset = open_set(root, exif_transpose=True)
    list(dataset)
    dataset.__getitems__(range(COUNT))
    assert dataset.find("a/03.png") == 3
    shard_loader(dataset, 4, shuffle=True, num_workers=0)
    assert states() == before


# -- threads


def test_threads_read_at_the_same_time(root: Path) -> None:
    dataset = open_set(root)
    wrong: list[object] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(20):
                index = rng.randrange(COUNT)
                if not right(index, *dataset[index][:2]):
                    wrong.append(index)
                batch = [rng.randrange(COUNT) for _ in range(20)]
                wrong.extend(i for i, s in zip(batch, dataset.__getitems__(batch), strict=True) if not right(i, *s[:2]))
        except Exception as error:  # noqa: BLE001  a thread's exception would be lost
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
