"""readers/handles.py: whose a handle is, how many there are, and that none is left."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from readers import ShardDataset, handles, system
from readers.errors import ReaderError, RecordCorruptError, ShardCorruptError, ShardNotFoundError
from readers.handles import open_shard
from readers.manifest import Manifest

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")


def set_bound(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let this process hold so many descriptors, from the next one on."""
    monkeypatch.setattr(handles, "_MOST_DESCRIPTORS", most)
    monkeypatch.setattr(handles, "_current", handles._Handles())


def descriptors(below: Path) -> list[str]:
    """This process's open files below a folder."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith(f"{below}/"):
            found.append(target)
    return found


def mappings(below: Path) -> list[str]:
    with open("/proc/self/maps") as file:
        return [line for line in file if f" {below}/" in line]


@pytest.fixture
def many(container: str, tmp_path: Path, write_set: Callable[..., Path]) -> Path:
    """24 shards of three records; the bytes say which."""
    shards = [[(b"%d/%d" % (n, i), b"k%02d/%d" % (n, i), 0) for i in range(3)] for n in range(24)]
    return write_set(tmp_path / "many", container, shards)


def expected(index: int) -> bytes:
    return b"%d/%d" % divmod(index, 3)


# -- the pid rule


class Spy(Dataset[Any]):
    """Samples of a set, each with the processes that opened the handles in sight."""

    def __init__(self, dataset: ShardDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, bytes, set[int], int]:
        image = self.dataset[index].image
        pids = {shard.pid for shard in [*self.dataset._shards.values(), *handles._handles().shards.values()]}
        return index, image, pids, os.getpid()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores, on purpose
def test_case_2_handles_in_a_worker_were_opened_in_that_worker(many: Path) -> None:
    dataset = ShardDataset(many, decode="bytes")
    for index in range(0, len(dataset), 2):  # the parent has most shards open when it forks
        assert dataset[index].image == expected(index)
    mine = {id(shard) for shard in dataset._shards.values()}
    loader: DataLoader[Any] = DataLoader(
        Spy(dataset), 5, shuffle=True, num_workers=4, collate_fn=list, multiprocessing_context="fork", timeout=60
    )
    for _ in range(3):
        seen = [sample for batch in loader for sample in batch]
        assert sorted(index for index, *_ in seen) == list(range(len(dataset)))
        for index, image, pids, pid in seen:
            assert image == expected(index)
            assert pids == {pid}
        assert dataset[1].image == expected(1)
    assert {id(shard) for shard in dataset._shards.values()} >= mine
    assert {shard.pid for shard in dataset._shards.values()} == {os.getpid()}


READS: dict[str, Callable[[ShardDataset], object]] = {
    "one": lambda dataset: dataset[0],
    "batch": lambda dataset: dataset.__getitems__([0, 1]),
    "large batch": lambda dataset: dataset.__getitems__([0, 1, 2] * 20),
    "key": lambda dataset: dataset.key(0),
    "label": lambda dataset: dataset.label(0),
    "targets": lambda dataset: dataset.targets,
    "find": lambda dataset: dataset.find("k00/0"),
    "samples": lambda dataset: dataset.samples[0],
}


@pytest.mark.parametrize("read", READS)
def test_no_way_to_read_uses_an_inherited_handle(many: Path, in_child: Callable[..., Any], read: str) -> None:
    """Not even one that another dataset of the parent keeps alive."""
    dataset, other = ShardDataset(many, decode="bytes"), ShardDataset(many, decode="bytes")
    assert list(dataset) == list(other)

    def child() -> set[bool]:
        READS[read](dataset)
        return {shard.pid == os.getpid() for shard in dataset._shards.values()}

    assert in_child(child) == {True}
    assert {shard.pid for shard in other._shards.values()} == {os.getpid()}


def test_lock_held_at_fork_is_not_waited_for(many: Path, in_child: Callable[..., Any]) -> None:
    dataset = ShardDataset(many, decode="bytes")
    with handles._handles().lock:
        assert in_child(lambda: dataset[0].image) == expected(0)


def test_grandchild_opens_its_own_too(many: Path, in_child: Callable[..., Any]) -> None:
    dataset = ShardDataset(many, decode="bytes")
    assert dataset[0].image == expected(0)

    def child() -> Any:
        assert dataset[0].image == expected(0)
        return in_child(lambda: (dataset[0].image, {s.pid for s in dataset._shards.values()} == {os.getpid()}))

    assert in_child(child) == (expected(0), True)


def test_inherited_descriptors_are_dropped_in_the_child(many: Path, in_child: Callable[..., Any]) -> None:
    dataset = ShardDataset(many, decode="bytes")
    list(dataset)
    held = descriptors(many)
    assert len(held) == 24

    def child() -> int:
        assert len(descriptors(many)) == 24
        assert dataset[0].image == expected(0)
        gc.collect()
        return len(descriptors(many))

    assert in_child(child) == 1
    assert descriptors(many) == held


def test_child_that_reads_in_two_threads_at_once_never_uses_an_inherited_handle(
    many: Path, in_child: Callable[..., Any]
) -> None:
    """A second thread reads in the very moment in which the first has noticed that the process is new."""

    class Hooked(ShardDataset):
        hook: Callable[[], None] | None = None

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if self.hook is not None and name in ("_pid", "_shards"):
                hook, self.__dict__["hook"] = self.hook, None
                hook()

    dataset = Hooked(many, decode="bytes")
    list(dataset)

    def child() -> set[bool]:
        pids: list[int] = []
        opened = handles.Shard.image

        def image(shard: Any, position: int) -> Any:
            pids.append(shard.pid)
            return opened(shard, position)

        handles.Shard.image = image  # type: ignore[method-assign]

        def read_in_another_thread() -> None:
            thread = threading.Thread(target=lambda: dataset[0])
            thread.start()
            thread.join()

        dataset.__dict__["hook"] = read_in_another_thread
        dataset[1]
        return {pid == os.getpid() for pid in pids}

    assert in_child(child) == {True}


# -- one handle a file


def test_datasets_over_one_set_share_handles(many: Path) -> None:
    first, second = ShardDataset(many, decode="bytes"), ShardDataset(many, decode="bytes")
    assert first[0] == second[0]
    assert first._shards[0] is second._shards[0]
    del first
    assert second[1].image == expected(1)


def test_handle_lives_as_long_as_a_dataset_reads_it(many: Path) -> None:
    dataset = ShardDataset(many, decode="bytes")
    list(dataset)
    keys = [key for key in handles._handles().shards if key[0].startswith(str(many))]
    assert len(keys) == 24
    del dataset
    gc.collect()
    assert not [key for key in handles._handles().shards if key[0].startswith(str(many))]


def test_nothing_is_left_when_datasets_go(many: Path) -> None:
    for _ in range(2):
        dataset = ShardDataset(many, decode="bytes")
        list(dataset)
        assert dataset.targets.tolist() == [0] * 72
        rows = next(iter(dataset._shards.values())).rows()
        assert descriptors(many)
        assert mappings(many)
        del dataset
        gc.collect()
        assert not descriptors(many)
        assert rows["label"].tolist() == [0] * 3  # what still looks at a mapping keeps it
        del rows
        gc.collect()
        assert not mappings(many)


def test_nothing_is_left_of_shards_that_could_not_be_opened(small_copy: Any) -> None:
    dataset = ShardDataset(small_copy.root)
    with open(small_copy.shard_file(0), "r+b") as file:
        data = file.read()
        file.seek(0)
        file.write(bytes(byte ^ 0xFF for byte in data))
    for _ in range(20):
        with pytest.raises(ShardCorruptError):
            dataset[0]
    gc.collect()
    assert not descriptors(small_copy.root)
    assert not mappings(small_copy.root)


def test_mapping_needs_no_descriptor(many: Path) -> None:
    dataset = ShardDataset(many, decode="bytes")
    list(dataset)
    for shard in dataset._shards.values():
        shard._file = None
    assert not descriptors(many)
    assert mappings(many)
    assert dataset[70].image == expected(70)
    assert len(descriptors(many)) == 1


# -- few descriptors


def test_600_shards_with_256_descriptors(
    container: str, tmp_path: Path, write_set: Callable[..., Path], in_child: Callable[..., Any]
) -> None:
    root = write_set(tmp_path / "set", container, [[(b"image%d" % i, b"key%d" % i, 0) for i in range(2)], *[0] * 599])

    def child() -> tuple[int, bool]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        dataset = ShardDataset(root, decode="bytes")
        order = list(range(1200))
        random.Random(0).shuffle(order)
        good = all(dataset[i].image == b"image%d" % (i % 2) for i in [*order, *reversed(order)])
        return len(descriptors(root)), good and len(dataset.targets) == 1200

    held, good = in_child(child)
    assert good
    assert 128 <= held <= 256 - 48  # the rest is left to the user


def test_no_more_descriptors_than_the_bound(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, 4)
    dataset = ShardDataset(many, decode="bytes")
    most = 0
    for index in [*range(72), *range(71, -1, -1)]:
        assert dataset[index].image == expected(index)
        most = max(most, len(descriptors(many)))
    assert most == 4


def test_bound_holds_for_batches_too(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, 2)
    dataset = ShardDataset(many, decode="bytes")
    order = list(range(72)) * 3
    random.Random(1).shuffle(order)
    assert [sample.image for sample in dataset.__getitems__(order)] == [expected(i) for i in order]
    assert len(descriptors(many)) <= 2


@pytest.mark.parametrize("most", [1, 4])
def test_threads_read_right_while_descriptors_are_evicted(
    many: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    set_bound(monkeypatch, most)
    dataset = ShardDataset(many, decode="bytes")
    wrong: list[object] = []
    held: list[int] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for turn in range(150):
                index = rng.randrange(72)
                if dataset[index].image != expected(index):
                    wrong.append(index)
                if turn % 50 == 0:
                    held.append(len(descriptors(many)))
        except Exception as error:  # noqa: BLE001  a thread's exception would be lost
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert max(held) <= most + 8  # a thread keeps the file it is reading from
    assert len(descriptors(many)) <= most


def test_threads_open_each_shard_once(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    plain = handles.Shard

    class Counting(plain):  # type: ignore[misc,valid-type]
        __slots__ = ()

        def __init__(self, path: str, *rest: Any) -> None:
            opened.append(path)
            super().__init__(path, *rest)

    monkeypatch.setattr(handles, "Shard", Counting)
    dataset = ShardDataset(many, decode="bytes")
    barrier = threading.Barrier(6)

    def read() -> None:
        barrier.wait()
        for index in range(0, 72, 3):
            dataset[index]

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == len(set(opened)) == 24


# -- files that change under a handle


@pytest.fixture
def evicted(many: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ShardDataset, Path]:
    """A dataset that has read shard 0 and had to close its file; and that file."""
    set_bound(monkeypatch, 1)
    dataset = ShardDataset(many, decode="bytes")
    assert dataset[0].image == expected(0)
    assert dataset[3].image == expected(3)
    return dataset, Path(dataset.manifest.shard_path(str(many), 0))


def test_file_replaced_while_it_was_closed_is_refused(evicted: tuple[ShardDataset, Path]) -> None:
    dataset, path = evicted
    data = path.read_bytes()
    path.rename(path.with_suffix(".old"))
    path.write_bytes(bytes(byte ^ 0xFF for byte in data))
    with pytest.raises(ShardCorruptError, match="replaced while it was in use"):
        dataset[1]
    path.write_bytes(data)  # the same bytes in another file are as good
    assert dataset[1]


def test_file_removed_while_it_was_closed_is_a_missing_shard(evicted: tuple[ShardDataset, Path]) -> None:
    dataset, path = evicted
    path.unlink()
    with pytest.raises(ShardNotFoundError, match="deleted while it was in use"):
        dataset[1]


def test_open_file_may_be_unlinked(many: Path) -> None:
    dataset = ShardDataset(many, decode="bytes")
    assert dataset[0].image == expected(0)
    os.unlink(dataset.manifest.shard_path(str(many), 0))
    assert dataset[1].image == expected(1)


def test_file_cut_while_it_is_open_gives_no_wrong_bytes(many: Path, in_child: Callable[..., Any]) -> None:
    """The index is mapped: a shorter file may end the process by SIGBUS, but never lie."""

    def child() -> list[str]:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)  # pytest's own handler would print a stack
        dataset = ShardDataset(many, decode="bytes")
        path = dataset.manifest.shard_path(str(many), 0)
        assert dataset[0].image == expected(0)
        size = os.path.getsize(path)
        found = []
        for length in range(size - 1, 4096, -64):
            os.truncate(path, length)
            for index in range(3):
                try:
                    found.append("right" if dataset[index].image == expected(index) else "wrong")
                except ReaderError as error:
                    found.append(type(error).__name__)
        return found

    try:
        found = in_child(child)
    except AssertionError as error:
        found = [str(error)]
    assert "wrong" not in found
    assert len(found) > 3 or found == [f"the child hung, or died by {-signal.SIGBUS}"]


# -- values


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_short_reads_are_finished(small: Any, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """As a signal or a network file system may cause."""
    shard = small.open(1)
    monkeypatch.setattr(handles, "pread", lambda fd, length, offset: os.pread(fd, min(length, step), offset))
    assert [shard.image(i) for i in range(7)] == list(zip(small.images[7:14], small.labels[7:14], strict=True))
    assert [shard.key(i) for i in range(7)] == [os.fsencode(key) for key in small.keys[7:14]]
    assert shard.images(np.arange(7).repeat(4))[0] == [image for image in small.images[7:14] for _ in range(4)]


def test_read_error_of_the_system_passes_as_it_is(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = small.open(0)

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(handles, "pread", fail)
    with pytest.raises(OSError, match="Input/output error"):
        shard.image(0)


def test_value_that_ends_early_says_so(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = small.open(0)
    monkeypatch.setattr(handles, "pread", lambda *_: b"")
    with pytest.raises(RecordCorruptError, match="end after 0") as caught:
        shard.image(2)
    assert caught.value.position == 2
    assert caught.value.key is None


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, write_set: Callable[..., Path]) -> dict[str, Path]:
    """20,000 tiny records in one shard: two blocks of index rows in LMDB."""
    folder = tmp_path_factory.mktemp("wide")
    return {
        name: write_set(folder / name, name, [((b"i%d" % n, b"k%d" % n, n % 7) for n in range(20_000))])
        for name in ("hdf5", "lmdb")
    }


@settings(max_examples=40)
@given(st.sampled_from(["hdf5", "lmdb"]), st.lists(st.integers(0, 19_999), max_size=60))
def test_many_at_once_are_what_they_are_one_by_one(wide: dict[str, Path], name: str, positions: list[int]) -> None:
    shard = open_shard(str(wide[name]), Manifest.load(wide[name]), 0)
    images, labels = shard.images(np.array(positions, np.int64))
    assert images == [b"i%d" % n for n in positions]
    assert labels == [n % 7 for n in positions]
    assert [shard.image(n) for n in positions] == list(zip(images, labels, strict=True))
    assert [shard.key(n) for n in positions] == [b"k%d" % n for n in positions]


def test_rows_across_blocks(wide: dict[str, Path]) -> None:
    tables = [open_shard(str(root), Manifest.load(root), 0).rows() for root in wide.values()]
    for name in ("label", "image_length", "image_crc32c", "key_length", "key_crc32c"):
        assert (tables[0][name] == tables[1][name]).all()
    assert tables[0]["label"].tolist() == [n % 7 for n in range(20_000)]


def test_index_is_not_copied_on_open(wide: dict[str, Path]) -> None:
    import tracemalloc

    manifest = Manifest.load(wide["hdf5"])
    tracemalloc.start()
    shard = open_shard(str(wide["hdf5"]), manifest, 0)
    shard.image(19_999)
    shard.rows()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000 < 20_000 * 56


def test_shard_says_what_it_is(small: Any) -> None:
    shard = small.open(0)
    assert repr(shard) == f"Shard({str(small.shard_file(0))!r}, 7 records)"
    assert (shard.records, shard.pid, shard.path) == (7, os.getpid(), str(small.shard_file(0)))


# -- system.py


@settings(max_examples=50)
@given(st.integers(0, 20_000), st.integers(1, 20_000))
def test_map_file_gives_any_part(tmp_path_factory: pytest.TempPathFactory, offset: int, length: int) -> None:
    path = tmp_path_factory.getbasetemp() / "mapped"
    data = random.Random(0).randbytes(40_000)
    if not path.exists():
        path.write_bytes(data)
    fd = os.open(path, system.O_READ)
    view = system.map_file(fd, offset, length)
    os.close(fd)
    assert view == data[offset : offset + length]
    assert view.readonly
    assert np.frombuffer(view, np.uint8)[0] == data[offset]


def test_map_file_says_why_it_cannot(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises((OSError, ValueError)):
            system.map_file(fd, 0, 0)
    finally:
        os.close(fd)


def test_descriptor_limit_is_the_soft_limit(in_child: Callable[..., Any]) -> None:
    def child() -> int:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        return system.descriptor_limit()

    assert in_child(child) == 200
