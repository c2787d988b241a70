"""readers/loader.py: a stock DataLoader with settings that work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from packer import PackOptions, pack
from readers import RecordDecodeError, Sample, ShardDataset, collate, loader, shard_loader

more_workers_than_cores = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def tensors(small: Any) -> ShardDataset:
    return ShardDataset(small.root, decode="tensor")


@pytest.fixture
def numbers(small: Any) -> ShardDataset:
    """Samples (number of the record, label)."""
    order = {data: number for number, data in enumerate(small.images)}
    return ShardDataset(small.root, order.__getitem__, decode="bytes")


def seen(loader: Any) -> list[int]:
    return [int(number) for images, _ in loader for number in images]


def stop_workers(loader: DataLoader[Any]) -> None:
    """At once: after an error in a worker torch would wait five seconds for it."""
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()


# -- defaults


def test_defaults(tensors: ShardDataset) -> None:
    made = shard_loader(tensors, batch_size=4)
    assert type(made) is DataLoader
    assert made.num_workers == min(16, len(os.sched_getaffinity(0)))
    assert made.persistent_workers
    assert made.pin_memory == torch.cuda.is_available()
    assert made.prefetch_factor == 2
    assert made.collate_fn is collate
    assert isinstance(made.sampler, SequentialSampler)
    assert not made.drop_last
    assert isinstance(shard_loader(tensors, shuffle=True, num_workers=0).sampler, RandomSampler)
    assert shard_loader(tensors).batch_size == 1


def test_options_of_the_user_win(tensors: ShardDataset) -> None:
    made = shard_loader(
        tensors, 3, num_workers=1, persistent_workers=False, pin_memory=False, prefetch_factor=7, collate_fn=list,
        drop_last=True, timeout=9, multiprocessing_context="fork",
    )  # fmt: skip
    assert (made.persistent_workers, made.pin_memory, made.prefetch_factor) == (False, False, 7)
    assert (made.collate_fn, made.drop_last, made.timeout) == (list, True, 9)


def test_unknown_option_is_a_type_error(tensors: ShardDataset) -> None:
    with pytest.raises(TypeError, match="num_wrokers"):
        shard_loader(tensors, num_workers=0, num_wrokers=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_case_39_options_that_need_workers(numbers: ShardDataset, workers: int) -> None:
    options = {"persistent_workers": True, "prefetch_factor": 3, "timeout": 60, "multiprocessing_context": "fork"}
    for chosen in ([], [*options], *([name] for name in options)):
        made = shard_loader(numbers, 6, num_workers=workers, **{name: options[name] for name in chosen})
        assert seen(made) == list(range(20))
        del made


def test_case_39_refused_values_are_still_refused(tensors: ShardDataset) -> None:
    with pytest.raises(ValueError, match="num_workers"):
        shard_loader(tensors, num_workers=-1)


def test_case_40_and_41_batch_is_a_sample_of_tensors_and_nothing_else(tensors: ShardDataset, small: Any) -> None:
    batches = list(shard_loader(tensors, batch_size=8, num_workers=0))
    for batch in batches:
        assert isinstance(batch, Sample)
        assert [type(part) for part in batch] == [torch.Tensor, torch.Tensor]
        assert batch.image.dtype == torch.uint8
        assert batch.target.dtype == torch.int64
        assert batch.image.shape == (len(batch.target), 3, 8, 9)
    assert torch.cat([batch.target for batch in batches]).tolist() == small.labels


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_case_40_batch_is_pinned(tensors: ShardDataset) -> None:
    for workers in (0, 2):
        for images, targets in shard_loader(tensors, batch_size=8, num_workers=workers):
            assert images.is_pinned()
            assert targets.is_pinned()
            assert images.to("cuda", non_blocking=True).is_cuda


def test_unlabelled_set_gives_batches_of_images(container: str, tmp_path: Path, small: Any) -> None:
    pack(small.source, tmp_path / "set", PackOptions(format=container, workers=1, labels="none"))
    batches = list(shard_loader(ShardDataset(tmp_path / "set", decode="tensor"), 8, num_workers=0))
    assert [tuple(batch.shape) for batch in batches] == [(8, 3, 8, 9), (8, 3, 8, 9), (4, 3, 8, 9)]


def test_extras_come_as_columns(small: Any) -> None:
    dataset = ShardDataset(small.root, decode="tensor", extras=("index", "key"))
    images, labels, indices, keys = next(iter(shard_loader(dataset, 5, num_workers=0)))
    assert (images.shape[0], labels.tolist(), indices.tolist()) == (5, [0] * 5, [0, 1, 2, 3, 4])
    assert list(keys) == small.keys[:5]


def test_other_datasets_work_too() -> None:
    class Squares(Dataset[int]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            return index**2

    assert torch.cat(list(shard_loader(Squares(), 2, num_workers=0))).tolist() == [0, 1, 4, 9, 16]


# -- without batches


def test_batch_size_none_gives_single_samples(tensors: ShardDataset, small: Any) -> None:
    samples = list(shard_loader(tensors, batch_size=None, num_workers=0))
    assert [tuple(sample[0].shape) for sample in samples] == [(3, 8, 9)] * 20
    assert [int(sample[1]) for sample in samples] == small.labels
    assert samples[7][0].equal(tensors[7].image)


def test_batch_size_none_with_pictures_gives_pictures(small: Any) -> None:
    image, target = next(iter(shard_loader(ShardDataset(small.root), batch_size=None, num_workers=0)))
    assert isinstance(image, Image.Image)
    assert target == 0


# -- samplers


def test_sampler_of_the_user(numbers: ShardDataset) -> None:
    assert seen(shard_loader(numbers, 2, sampler=[5, 3, 19], num_workers=0)) == [5, 3, 19]


def test_batch_sampler_of_the_user(numbers: ShardDataset) -> None:
    made = shard_loader(numbers, batch_sampler=BatchSampler(range(0, 20, 4), 2, False), num_workers=0)
    assert seen(made) == [0, 4, 8, 12, 16]
    assert len(made) == 3


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_shuffle_with_a_sampler_is_refused_as_by_dataloader(tensors: ShardDataset, name: str) -> None:
    """Ignoring one of two contradicting wishes would train in an order nobody asked for."""
    given: dict[str, Any] = {name: [0, 1] if name == "sampler" else [[0, 1]]}
    with pytest.raises(ValueError, match="mutually exclusive"):
        DataLoader(tensors, shuffle=True, **given)
    with pytest.raises(ValueError, match="mutually exclusive"):
        shard_loader(tensors, shuffle=True, num_workers=0, **given)


def test_shuffle_is_complete_and_follows_the_generator(numbers: ShardDataset) -> None:
    def order(seed: int) -> list[list[int]]:
        made = shard_loader(numbers, 3, shuffle=True, num_workers=0, generator=torch.Generator().manual_seed(seed))
        return [seen(made), seen(made)]

    first, second = order(1)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert order(1) == [first, second]
    assert order(2) != [first, second]


# -- pictures do not collate


def test_pictures_without_transform_are_refused_with_the_remedy(small: Any) -> None:
    dataset = ShardDataset(small.root)
    for subject in (dataset, Subset(dataset, [0, 1]), Subset(Subset(dataset, [0, 1]), [0])):
        with pytest.raises(TypeError) as caught:
            shard_loader(subject)
        text = str(caught.value)
        for remedy in ('decode="tensor"', "ToTensor", "collate_fn=list"):
            assert remedy in text
    assert [type(image) for batch in shard_loader(dataset, 2, num_workers=0, collate_fn=list) for image, _ in batch]
    assert not shard_loader(ShardDataset(small.root, lambda image: image.width), num_workers=0).pin_memory or True


def test_transform_that_ends_in_a_tensor_is_enough(small: Any) -> None:
    from torchvision.transforms.v2.functional import pil_to_tensor

    images, _ = next(iter(shard_loader(ShardDataset(small.root, pil_to_tensor), 4, num_workers=0)))
    assert images.shape == (4, 3, 8, 9)


# -- case 49: mixed sizes


@pytest.fixture
def mixed(container: str, tmp_path: Path, pack_files: Callable[..., Any], draw_image: Callable[..., bytes]) -> Path:
    modes = ("L", "RGB", "CMYK", "RGB", "L")
    sizes = ((4, 4), (4, 4), (4, 4), (5, 3), (6, 6))
    files = {f"c/{n}.jpg": draw_image(n, size, mode) for n, (mode, size) in enumerate(zip(modes, sizes, strict=True))}
    files["c/5.png"] = draw_image(5, (4, 4), "RGBA", "PNG")
    files["c/6.png"] = draw_image(6, (4, 4), "LA", "PNG")
    files["c/7.png"] = draw_image(7, (4, 4), "P", "PNG")
    return Path(pack_files(tmp_path, files, container).root)


def test_case_49_all_modes_come_with_three_channels(mixed: Path) -> None:
    same_size = Subset(ShardDataset(mixed, decode="tensor"), [0, 1, 2, 5, 6, 7])
    images, _ = next(iter(shard_loader(same_size, 6, num_workers=0)))
    assert images.shape == (6, 3, 4, 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_case_49_mixed_sizes_say_which_and_what_to_do(mixed: Path, workers: int) -> None:
    made = shard_loader(ShardDataset(mixed, decode="tensor"), 8, num_workers=workers)
    with pytest.raises(RuntimeError) as caught:
        next(iter(made))
    text = str(caught.value)
    assert "a batch mixes image sizes: sample 0 of it is (3, 4, 4), sample 3 is (3, 3, 5)." in text
    assert "Resize in the transform, or pass collate_fn=list" in text
    stop_workers(made)


def test_case_49_remedies_work(mixed: Path) -> None:
    from torchvision.transforms.v2 import Compose, PILToTensor, Resize

    dataset = ShardDataset(mixed, Compose([Resize((8, 8)), PILToTensor()]))
    images, _ = next(iter(shard_loader(dataset, 8, num_workers=0)))
    assert images.shape == (8, 3, 8, 8)
    samples = next(iter(shard_loader(ShardDataset(mixed, decode="tensor"), 8, num_workers=0, collate_fn=list)))
    assert len({sample.image.shape for sample in samples}) == 3


def test_collate_of_images_alone_names_sizes_too() -> None:
    with pytest.raises(RuntimeError, match=r"sample 0 of it is \(2,\), sample 1 is \(3,\)"):
        collate([torch.zeros(2), torch.zeros(3)])


def test_collate_leaves_other_errors_as_they_are() -> None:
    with pytest.raises(RuntimeError) as caught:
        collate([(torch.zeros(2), torch.zeros(1)), (torch.zeros(2), torch.zeros(5))])
    assert "mixes image sizes" not in str(caught.value)


# -- case 44: lengths


@pytest.fixture(scope="module")
def of_103(
    tmp_path_factory: pytest.TempPathFactory, make_tree: Callable[..., Path], draw_image: Callable[..., bytes]
) -> dict[str, Path]:
    """103 samples; seven files of the source were rejected."""
    folder = tmp_path_factory.mktemp("of-103")
    files = {f"c/{n:03d}.png": draw_image(n, (2, 2), format="PNG") if n % 16 else b"bad" for n in range(110)}
    source = make_tree(folder / "source", files)
    for name in ("hdf5", "lmdb"):
        report = pack(source, folder / name, PackOptions(format=name, workers=1, shard_records=40, max_rejects="50%"))
        assert (report.packed, report.rejected) == (103, 7)
    return {name: folder / name for name in ("hdf5", "lmdb")}


@more_workers_than_cores
@pytest.mark.parametrize(
    ("workers", "drop_last"), [(0, False), (1, True), (2, False), (2, True), (3, False), (4, True)]
)
def test_case_44_length_is_the_number_of_batches(
    of_103: dict[str, Path], container: str, workers: int, drop_last: bool
) -> None:
    dataset = ShardDataset(of_103[container], decode="tensor", extras=("index",))
    made = shard_loader(dataset, 10, num_workers=workers, drop_last=drop_last, shuffle=True)
    for _ in range(2):
        batches = list(made)
        assert len(batches) == len(made) == (10 if drop_last else 11)
        indices = [int(i) for batch in batches for i in batch[2]]
        assert len(indices) == len(set(indices)) == (100 if drop_last else 103)
    assert len(dataset) == 103
    del made


# -- several ranks


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_process_group_brings_a_distributed_sampler(numbers: ShardDataset) -> None:
    made = shard_loader(numbers, 4, shuffle=True, num_workers=0)
    assert isinstance(made.sampler, DistributedSampler)
    epochs = []
    for epoch in range(2):
        made.sampler.set_epoch(epoch)
        epochs.append(seen(made))
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert epochs[0] != epochs[1]  # case 46
    assert seen(shard_loader(numbers, 4, num_workers=0)) == list(range(20))


@pytest.mark.usefixtures("process_group")
def test_sampler_of_the_user_wins_over_the_process_group(numbers: ShardDataset) -> None:
    assert seen(shard_loader(numbers, 2, sampler=[1, 2], num_workers=0)) == [1, 2]
    assert seen(shard_loader(numbers, batch_sampler=[[3], [4, 5]], num_workers=0)) == [3, 4, 5]


def test_case_45_indices_tell_padded_duplicates(small: Any) -> None:
    dataset = Subset(ShardDataset(small.root, decode="tensor", extras=("index",)), range(10))
    found = []
    for rank in range(4):
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=4, rank=rank, shuffle=False)
        for batch in shard_loader(dataset, 2, sampler=sampler, num_workers=0):
            found += batch[2].tolist()
    assert len(found) == 12
    assert sorted(set(found)) == list(range(10))


RANK = """
import json, sys, torch.distributed as dist
from readers import ShardDataset, shard_loader

def main(root, store, rank):
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    dataset = ShardDataset(root, decode="tensor", extras=("index",))
    loader = shard_loader(dataset, 3, shuffle=True, num_workers=2)
    epochs = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        batches = [batch[2].tolist() for batch in loader]
        assert len(batches) == len(loader)
        epochs.append(batches)
        dist.barrier()
    print(json.dumps(epochs))
    dist.destroy_process_group()

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""


@pytest.mark.slow
def test_case_43_and_46_two_ranks_share_one_shard_evenly(
    container: str, tmp_path: Path, pack_tree: Callable[..., Any], small: Any
) -> None:
    packed = pack_tree(small.source, tmp_path / "set", container)
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(packed.root), str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    epochs = [json.loads(process.communicate(timeout=120)[0]) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    for epoch in range(2):
        shares = [[index for batch in rank[epoch] for index in batch] for rank in epochs]
        assert [len(share) for share in shares] == [10, 10]
        assert sorted(shares[0] + shares[1]) == list(range(20))
        assert [len(rank[epoch]) for rank in epochs] == [4, 4]
    assert epochs[0][0] != epochs[0][1]


# -- errors in workers


def test_error_in_a_worker_keeps_type_and_message(
    container: str, tmp_path: Path, write_set: Callable[..., Path]
) -> None:
    root = write_set(tmp_path / "set", container, [[(b"no image", b"c/%d.jpg" % n, 0) for n in range(4)]])
    made = shard_loader(ShardDataset(root, decode="tensor"), 2, num_workers=1)
    with pytest.raises(RecordDecodeError, match=r"sample 0 \(key 'c/0\.jpg', record 0 of .*cannot be decoded"):
        next(iter(made))
    stop_workers(made)


def test_in_process_group_is_false_without_one() -> None:
    assert loader._in_process_group() is False
