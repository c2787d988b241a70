"""readers/dataset.py: a packed set as a sequence of samples."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

from packer import PackOptions, pack
from readers import (
    ReaderError,
    RecordCorruptError,
    Sample,
    ShardCorruptError,
    ShardDataset,
    ShardNotFoundError,
    UnfinishedSetError,
)
from readers.handles import Shard

MOST_PICKLE_BYTES = 4096


def opened(data: bytes) -> bytes:
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


@pytest.fixture
def dataset(small: Any) -> ShardDataset:
    return ShardDataset(small.root, decode="bytes")


# -- one sample


def test_sample_is_image_and_label(small: Any) -> None:
    dataset = ShardDataset(small.root)
    assert isinstance(dataset, Dataset)
    for index in range(20):
        sample = dataset[index]
        image, target = sample
        assert isinstance(sample, Sample)
        assert isinstance(image, Image.Image)
        assert image.mode == "RGB"
        assert image.tobytes() == opened(small.images[index])
        assert (sample.image, sample.target) == (image, target)
        assert target == small.labels[index]
        assert type(target) is int


def test_bytes_are_the_files_as_they_were(dataset: ShardDataset, small: Any) -> None:
    assert [sample.image for sample in dataset] == small.images
    assert [sample.target for sample in dataset] == small.labels


def test_case_36_tensor_samples_are_uint8(small: Any) -> None:
    image, target = ShardDataset(small.root, decode="tensor")[3]
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 8, 9))
    assert image.permute(1, 2, 0).numpy().tobytes() == opened(small.images[3])
    assert target == 0


def test_decode_may_be_any_callable(small: Any) -> None:
    assert ShardDataset(small.root, decode=len)[5].image == len(small.images[5])


def test_unknown_decode_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="decode must be one of"):
        ShardDataset(tmp_path, decode="jpeg")


def test_transform_and_target_transform(small: Any) -> None:
    dataset = ShardDataset(small.root, lambda image: image.size, lambda target: f"class {target}")
    assert dataset[0] == ((9, 8), "class 0")
    assert dataset[19] == ((9, 8), "class 1")
    assert isinstance(dataset[0], Sample)
    assert dataset.__getitems__([19, 0]) == [((9, 8), "class 1"), ((9, 8), "class 0")]


def test_transform_may_be_changed_afterwards(small: Any) -> None:
    dataset = ShardDataset(small.root)
    dataset.transform = lambda image: 7
    dataset.target_transform = lambda target: target + 10
    assert dataset[0] == (7, 10)
    assert dataset.__getitems__([0]) == [(7, 10)]
    dataset.transform = dataset.target_transform = None
    assert dataset[0].target == 0


def test_error_in_a_transform_passes_as_it_is(small: Any) -> None:
    def fail(image: Image.Image) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        ShardDataset(small.root, fail)[0]


@pytest.mark.parametrize(
    ("extras", "expected"),
    [
        (("index",), (7,)),
        (("key",), ("a/7.png",)),
        (("key", "index"), ("a/7.png", 7)),
        (["index", "key"], (7, "a/7.png")),
    ],
)
def test_extras_are_appended_in_the_order_asked(small: Any, extras: Any, expected: tuple[Any, ...]) -> None:
    dataset = ShardDataset(small.root, decode="bytes", extras=extras)
    assert dataset[7] == (small.images[7], 0, *expected)
    assert dataset[-13] == (small.images[7], 0, *expected)
    assert type(dataset[7]) is tuple
    assert dataset.__getitems__([12, 7])[1] == dataset[7]


@pytest.mark.parametrize("extras", [("path",), "index", ("index", "Key")])
def test_unknown_extra_is_refused(small: Any, extras: Any) -> None:
    with pytest.raises(ValueError, match="extras may hold index and key, got"):
        ShardDataset(small.root, extras=extras)


# -- case 52: indices

GOOD_INDICES = [
    int, np.int64, np.int32, np.uint8, np.intp, lambda i: np.array(i), torch.tensor,
    lambda i: torch.tensor(i, dtype=torch.uint8),
]  # fmt: skip


@pytest.mark.parametrize("kind", GOOD_INDICES, ids=repr)
def test_case_52_integers_of_any_kind(dataset: ShardDataset, small: Any, kind: Callable[[int], Any]) -> None:
    for index in (0, 1, 6, 7, 13, 19):
        assert dataset[kind(index)] == (small.images[index], small.labels[index])
        assert dataset.__getitems__([kind(index)]) == [dataset[index]]
        assert dataset.key(kind(index)) == small.keys[index]
        assert dataset.samples[kind(index)] == (small.keys[index], small.labels[index])


def test_case_52_negative_indices_count_from_the_end(dataset: ShardDataset, small: Any) -> None:
    for index in range(-20, 0):
        assert dataset[index] == (small.images[index], small.labels[index])
        assert dataset.key(index) == small.keys[index]
        assert dataset.samples[index] == (small.keys[index], small.labels[index])
    assert dataset.__getitems__([-1, -20, np.int64(-7), torch.tensor(-8)]) == [dataset[i] for i in (19, 0, 13, 12)]


@pytest.mark.parametrize(
    "index", [20, -21, 10**6, -(10**6), 2**63, -(2**63) - 1, 2**64 - 1, 10**30, np.uint64(2**64 - 1)]
)
def test_case_52_past_the_end_is_an_index_error(dataset: ShardDataset, small: Any, index: Any) -> None:
    message = rf"sample index {index} is out of range for 20 samples \({small.root}, 3 shards\)"
    with pytest.raises(IndexError, match=message):
        dataset[index]
    for batch in ([index], [0, index], [index, 0, 1]):
        with pytest.raises(IndexError, match=message):
            dataset.__getitems__(batch)
    with pytest.raises(IndexError):
        dataset.key(index)
    with pytest.raises(IndexError):
        dataset.samples[index]


@pytest.mark.parametrize(
    "index",
    [0.0, 1.5, "0", b"0", None, [0], (0,), {}, np.float64(1), torch.tensor(1.0), torch.tensor([0, 1]), slice(0, 2)],
    ids=repr,
)
def test_case_52_what_is_no_integer_is_a_type_error(dataset: ShardDataset, index: Any) -> None:
    with pytest.raises(TypeError):
        dataset[index]
    with pytest.raises(TypeError):
        dataset.__getitems__([0, index])
    with pytest.raises(TypeError):
        dataset.key(index)


def test_case_52_plain_loops_end(dataset: ShardDataset, small: Any) -> None:
    assert [image for image, _ in dataset] == small.images
    assert [image for image, _ in reversed(dataset)] == small.images[::-1]  # type: ignore[call-overload]
    count = 0
    while True:
        try:
            dataset[count]
        except IndexError:
            break
        count += 1
    assert count == len(dataset) == 20
    first, *_, last = dataset
    assert (first.image, last.image) == (small.images[0], small.images[19])


# -- batches


@settings(max_examples=60)
@given(st.sampled_from(["hdf5", "lmdb"]), st.lists(st.integers(-20, 19), max_size=50))
def test_batch_in_any_order_with_repeats(small_sets: dict[str, Any], name: str, indices: list[int]) -> None:
    small = small_sets[name]
    dataset = ShardDataset(small.root, decode="bytes")
    samples = dataset.__getitems__(indices)
    assert samples == [(small.images[i], small.labels[i]) for i in indices]
    assert all(type(sample) is Sample for sample in samples)
    with_extras = ShardDataset(small.root, decode="bytes", extras=("index", "key"))
    assert with_extras.__getitems__(indices) == [
        (small.images[i], small.labels[i], i % 20, small.keys[i]) for i in indices
    ]


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, list], ids=repr)
def test_batch_of_indices_in_any_container(dataset: ShardDataset, make: Callable[[list[int]], Any]) -> None:
    indices = [3, 17, -1, 3, 0]
    assert dataset.__getitems__(make(indices)) == [dataset[i] for i in indices]


def test_labels_of_a_batch_are_plain_integers(dataset: ShardDataset) -> None:
    for sample in dataset.__getitems__(list(range(20))) + dataset.__getitems__([5]):
        assert type(sample.target) is int


def test_empty_batch(dataset: ShardDataset) -> None:
    assert dataset.__getitems__([]) == []


def test_batch_visits_each_shard_once_in_the_order_of_its_file(
    dataset: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits: list[tuple[str, int]] = []
    plain = Shard.image

    def image(shard: Shard, position: int) -> Any:
        visits.append((os.path.basename(shard.path)[:7], position))
        return plain(shard, position)

    monkeypatch.setattr(Shard, "image", image)
    dataset.__getitems__([19, 0, 7, 6, 13, 8, 0, 14])
    places = [("0000000", 0), ("0000000", 0), ("0000000", 6), ("0000001", 0), ("0000001", 1), ("0000001", 6)]
    assert visits == [*places, ("0000002", 0), ("0000002", 5)]


def test_batch_with_a_bad_index_reads_nothing(dataset: ShardDataset) -> None:
    with pytest.raises(IndexError):
        dataset.__getitems__([0, 1, 20])
    assert not dataset._shards


@pytest.mark.parametrize("others", [[], list(range(20))], ids=["few", "many"])
def test_damage_in_a_batch_names_sample_record_and_key(small_copy: Any, others: list[int]) -> None:
    path = small_copy.shard_file(1)
    data = bytearray(path.read_bytes())
    data[data.index(small_copy.images[9]) + 20] ^= 1
    path.write_bytes(data)
    dataset = ShardDataset(small_copy.root, decode="bytes")
    with pytest.raises(RecordCorruptError, match=r"record 2 .*'a/9\.png'") as caught:
        dataset.__getitems__([9, *others] * 3)
    assert "sample index 9" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert (caught.value.shard_path, caught.value.position) == (str(path), 2)


def test_subset_and_random_split(dataset: ShardDataset) -> None:
    subset = Subset(dataset, [19, 3, 3, -1])
    assert [subset[i] for i in range(4)] == [dataset[i] for i in (19, 3, 3, 19)]
    assert subset.__getitems__([3, 0, 1]) == [dataset[i] for i in (19, 19, 3)]
    one, two = random_split(dataset, [5, 15], torch.Generator().manual_seed(0))
    assert sorted([*one.indices, *two.indices]) == list(range(20))
    nested = Subset(one, [4, 0])
    assert nested.__getitems__([0, 1]) == [dataset[one.indices[4]], dataset[one.indices[0]]]


def test_concatenated_datasets(dataset: ShardDataset) -> None:
    both = ConcatDataset([dataset, Subset(dataset, [5])])
    assert len(both) == 21
    assert both[20] == both[5] == dataset[5]
    assert both[-1] == dataset[5]


# -- what ImageFolder offers


def test_classes_and_targets(dataset: ShardDataset, small: Any) -> None:
    assert dataset.classes == ["a", "b"]
    assert dataset.class_to_idx == {"a": 0, "b": 1}
    assert dataset.targets.dtype == np.int64
    assert dataset.targets.tolist() == small.labels
    assert [dataset.label(i) for i in range(20)] == small.labels


def test_what_is_handed_out_may_be_changed(dataset: ShardDataset) -> None:
    dataset.targets[:] = 5
    dataset.classes.append("c")
    dataset.class_to_idx["a"] = 7
    assert dataset.targets.tolist() == [0] * 10 + [1] * 10
    assert dataset.classes == ["a", "b"]
    assert dataset.class_to_idx == {"a": 0, "b": 1}


def test_samples_are_a_lazy_sequence(dataset: ShardDataset, small: Any) -> None:
    samples = dataset.samples
    assert not dataset._shards, "nothing is read before it is asked for"
    expected = list(zip(small.keys, small.labels, strict=True))
    assert len(samples) == 20
    assert list(samples) == expected
    assert samples[3] == expected[3]
    assert ("b/9.png", 1) in samples
    assert samples.index(("b/0.png", 1)) == 10
    for part in (slice(2, 5), slice(None), slice(None, None, -3), slice(-4, None), slice(50, 60)):
        assert samples[part] == expected[part]
    with pytest.raises(IndexError):
        samples[20]
    assert pickle.loads(pickle.dumps(samples))[19] == expected[19]


def test_one_label_costs_the_same_in_a_shard_of_any_size(
    container: str, tmp_path: Path, write_set: Callable[..., Path]
) -> None:
    """`samples` and `label` must not gather the whole index (1.1 MB here) to look at one row."""
    root = write_set(tmp_path / "set", container, [((b"i", b"k%05d" % n, n % 3) for n in range(20_000))])
    dataset = ShardDataset(root, decode="bytes")
    assert dataset.samples[19_999] == ("k19999", 19_999 % 3)
    tracemalloc.start()
    assert dataset.label(19_998) == 19_998 % 3
    assert dataset.samples[0] == ("k00000", 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_set_without_labels(container: str, tmp_path: Path, pack_tree: Callable[..., Any], small: Any) -> None:
    packed = pack_tree(small.source, tmp_path / "set", container, labels="none", shard_records=6)
    dataset = ShardDataset(packed.root, decode="bytes", target_transform=lambda target: 1 / 0)
    assert list(dataset) == small.images
    assert dataset[-1] == small.images[-1]
    assert dataset.__getitems__([3, 0, *range(20)]) == [small.images[i] for i in (3, 0, *range(20))]
    assert (dataset.classes, dataset.class_to_idx) == ([], {})
    assert dataset.targets.tolist() == [-1] * 20
    assert dataset.label(4) == -1
    assert dataset.samples[4] == (small.keys[4], -1)
    assert [dataset.find(key) for key in small.keys] == list(range(20))
    assert "no labels" in repr(dataset)
    assert isinstance(ShardDataset(packed.root)[0], Image.Image)
    with_extras = ShardDataset(packed.root, decode="bytes", extras=("index", "key"))
    assert with_extras[2] == (small.images[2], 2, small.keys[2])
    assert with_extras.__getitems__([2] * 20)[0] == with_extras[2]


def test_flat_folder_has_no_labels(
    container: str, tmp_path: Path, pack_files: Callable[..., Any], draw_image: Any
) -> None:
    files = {f"{n}.jpg": draw_image(n) for n in range(5)}
    dataset = ShardDataset(pack_files(tmp_path, files, container).root, decode="bytes")
    assert list(dataset) == list(files.values())


def test_labels_of_a_class_map(container: str, tmp_path: Path, small: Any) -> None:
    (tmp_path / "classes.txt").write_text("b\nnone\na\n")
    pack(small.source, tmp_path / "set", PackOptions(format=container, workers=1, class_map=tmp_path / "classes.txt"))
    dataset = ShardDataset(tmp_path / "set", decode="bytes")
    assert dataset.classes == ["b", "none", "a"]
    assert dataset.class_to_idx == {"b": 0, "none": 1, "a": 2}
    assert [image for image, _ in dataset] == small.images
    assert dataset.targets.tolist() == [2] * 10 + [0] * 10
    assert [dataset.find(key) for key in small.keys] == list(range(20))


def test_shards_without_records(
    container: str, tmp_path: Path, make_tree: Callable[..., Path], draw_image: Any
) -> None:
    """Every candidate of a shard may be rejected; positions stay dense."""
    good = {0, 5, 6, 11}
    files = {f"{'ab'[n // 6]}/{n:02d}.jpg": draw_image(n) if n in good else b"bad" for n in range(12)}
    source = make_tree(tmp_path / "source", files)
    pack(source, tmp_path / "set", PackOptions(format=container, workers=1, shard_records=2, max_rejects="100%"))
    dataset = ShardDataset(tmp_path / "set", decode="bytes")
    assert dataset.manifest.shard_records == (1, 0, 1, 1, 0, 1)
    assert [image for image, _ in dataset] == [files[f"{'ab'[n // 6]}/{n:02d}.jpg"] for n in sorted(good)]
    assert dataset.__getitems__([3, 0, 2, 1]) == [dataset[i] for i in (3, 0, 2, 1)]
    assert dataset.targets.tolist() == [0, 0, 1, 1]
    assert [dataset.find(key) for key, _ in dataset.samples] == [0, 1, 2, 3]


def test_set_without_records(container: str, tmp_path: Path, make_tree: Callable[..., Path]) -> None:
    source = make_tree(tmp_path / "source", {"a/1.jpg": b"bad", "b/2.jpg": b""})
    pack(source, tmp_path / "set", PackOptions(format=container, workers=1, max_rejects="100%"))
    dataset = ShardDataset(tmp_path / "set")
    assert len(dataset) == 0
    assert list(dataset) == []
    assert dataset.__getitems__([]) == []
    assert dataset.targets.tolist() == []
    assert list(dataset.samples) == []
    for index in (0, -1):
        with pytest.raises(IndexError, match="out of range for 0 samples"):
            dataset[index]
    with pytest.raises(KeyError):
        dataset.find("a/1.jpg")
    assert "0 samples" in repr(dataset)


# -- keys

ODD_KEYS = [
    b"a/plain.jpg", b"a/\xff\xfe.jpg", b"a/\xc3\xa9.jpg", b"a/e\xcc\x81.jpg", b"a/new\nline.jpg",
    b"a/ .jpg", b"a/b/deep.jpg",
    b"a/b-c/x.jpg", b"a/b.jpg", b"a-b/x.jpg", b"\xe9/latin-1.jpg", b"z/\xf0\x9f\x98\x80.jpg", b"z/back\\slash.jpg",
    b"z/q\"'.jpg",
    b"z/" + b"n" * 251 + b".jpg", b"z/" + b"/".join([b"d" * 200] * 3) + b"/long.jpg",
]  # fmt: skip


@pytest.mark.parametrize("shuffle", [None, 0, 12345])
@pytest.mark.parametrize("labels", ["folders", "none"])
def test_case_32_key_and_find_with_odd_names(
    container: str, tmp_path: Path, draw_image: Any, shuffle: int | None, labels: str
) -> None:
    files = {key: draw_image(number) for number, key in enumerate(ODD_KEYS)}
    for key, data in files.items():
        path = os.path.join(os.fsencode(tmp_path), b"source", key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
    options = PackOptions(format=container, workers=1, shuffle=shuffle, labels=labels, shard_records=3)
    pack(tmp_path / "source", tmp_path / "set", options)
    dataset = ShardDataset(tmp_path / "set", decode="bytes")
    assert sorted(dataset.key(i) for i in range(len(dataset))) == sorted(map(os.fsdecode, files))
    for key, data in files.items():
        index = dataset.find(key)
        assert index == dataset.find(os.fsdecode(key))
        assert dataset.key(index) == os.fsdecode(key)
        sample = dataset[index]
        assert (sample if labels == "none" else sample.image) == data


@pytest.mark.parametrize(
    "key",
    [
        "",
        "a",
        "a/",
        "a/0",
        "a/0.pn",
        "a/0.png ",
        "/a/0.png",
        "b/99.png",
        "zzz",
        "\udcff",
        "é",
        b"\xff",
        b"",
        "a\0b",
    ],
)
def test_key_that_is_not_there_is_a_key_error(dataset: ShardDataset, small: Any, key: str | bytes) -> None:
    with pytest.raises(KeyError, match="is not in"):
        dataset.find(key)


def test_key_that_no_file_can_have_is_a_key_error(dataset: ShardDataset) -> None:
    with pytest.raises(KeyError, match="is not in"):
        dataset.find("a/\ud800.png")


def test_find_reads_few_keys(container: str, tmp_path: Path, write_set: Callable[..., Path], monkeypatch: Any) -> None:
    shards = [[(b"i", b"c/%05d" % (n * 500 + i), 0) for i in range(500)] for n in range(8)]
    dataset = ShardDataset(write_set(tmp_path / "set", container, shards), decode="bytes")
    reads = []
    plain = Shard.key
    monkeypatch.setattr(Shard, "key", lambda shard, position: reads.append(position) or plain(shard, position))
    for wanted in (0, 1, 1999, 2000, 3998, 3999):
        reads.clear()
        assert dataset.find(f"c/{wanted:05d}") == wanted
        assert len(reads) <= 14  # log2(4000) is 12


# -- pickling and copying (cases 1 and 15)


def test_case_1_and_15_dataset_in_use_pickles_small_and_goes_on(dataset: ShardDataset, small: Any) -> None:
    assert (len(dataset), len(list(dataset)), dataset.targets.sum()) == (20, 20, 10)
    assert dataset.find("b/3.png") == 13
    data = pickle.dumps(dataset)
    assert len(data) < MOST_PICKLE_BYTES
    again = pickle.loads(data)
    assert not again._shards
    assert list(again) == list(dataset)
    assert again.classes == dataset.classes
    assert pickle.loads(pickle.dumps(again))[19] == dataset[19]
    assert dataset[0].image == small.images[0]


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@pytest.mark.parametrize("decode", ["pil", "tensor", "bytes"])
def test_case_15_dataset_in_use_copies(small: Any, copier: Callable[[Any], Any], decode: str) -> None:
    dataset = ShardDataset(small.root, decode=decode, exif_transpose=True, extras=("key",), max_pixels=1000)
    before = dataset[12]
    again = copier(dataset)
    assert again[12][1:] == before[1:] == (1, "b/2.png")
    assert np.array_equal(np.asarray(bytearray(again[12][0]) if decode == "bytes" else again[12][0]),
                          np.asarray(bytearray(before[0]) if decode == "bytes" else before[0]))  # fmt: skip
    del dataset
    assert again.__getitems__([12, 0])[0][2] == "b/2.png"


def test_pickle_keeps_the_options(small: Any) -> None:
    dataset = ShardDataset(small.root, len, str, decode="bytes", extras=("index",))
    assert pickle.loads(pickle.dumps(dataset))[11] == (len(small.images[11]), "1", 11)


def test_unpickling_touches_no_file(small_copy: Any) -> None:
    data = pickle.dumps(ShardDataset(small_copy.root))
    shutil.rmtree(small_copy.root)
    dataset = pickle.loads(data)
    with pytest.raises(UnfinishedSetError):
        dataset[0]


def test_shard_handles_are_in_no_pickle(dataset: ShardDataset) -> None:
    list(dataset)
    state = dataset.__getstate__()
    assert all(not isinstance(value, Shard) for value in state.values())
    assert (state["_shards"], state["_manifest"]) == ({}, None)


# -- where the set is


def test_constructor_opens_no_shard(dataset: ShardDataset) -> None:
    assert (len(dataset), dataset.classes) == (20, ["a", "b"])
    assert not dataset._shards


def test_relative_folder_stays_right_when_the_working_folder_changes(
    small: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(small.root.parent)
    dataset = ShardDataset(small.root.name, decode="bytes")
    monkeypatch.chdir(tmp_path)
    assert dataset[0].image == small.images[0]
    assert pickle.loads(pickle.dumps(dataset))[0].image == small.images[0]


@pytest.mark.parametrize("kind", [str, Path, lambda path: f"{path}/", lambda path: f"{path}/../{path.name}"])
def test_folder_may_be_given_in_any_form(small: Any, kind: Callable[[Path], Any]) -> None:
    assert ShardDataset(kind(small.root), decode="bytes")[0].image == small.images[0]


def test_no_set_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnfinishedSetError, match="no such folder"):
        ShardDataset(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="not a finished packed set"):
        ShardDataset(tmp_path)


def test_reading_creates_and_changes_nothing(small_copy: Any) -> None:
    def listing() -> list[tuple[str, int, int]]:
        found = [(str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in small_copy.root.rglob("*")]
        return sorted(found)

    before = listing()
    dataset = ShardDataset(small_copy.root)
    list(dataset)
    assert dataset.targets.sum() == 10
    del dataset
    assert listing() == before


# -- the set is packed anew while it is in use


def repack(small_copy: Any, draw_image: Any, tmp_path: Path, make_tree: Any) -> None:
    files = {key: draw_image(number + 50, (9, 8), format="PNG") for number, key in enumerate(small_copy.keys)}
    source = make_tree(tmp_path / "other", files)
    options = PackOptions(format=small_copy.container, workers=1, shard_records=7, overwrite=True)
    pack(source, small_copy.root, options)


def test_set_packed_anew_is_noticed(small_copy: Any, tmp_path: Path, draw_image: Any, make_tree: Any) -> None:
    dataset = ShardDataset(small_copy.root, decode="bytes")
    assert dataset[0].image == small_copy.images[0]
    shipped = pickle.dumps(dataset)
    repack(small_copy, draw_image, tmp_path, make_tree)
    assert dataset[1].image == small_copy.images[1], "a shard that is open stays what it was"
    with pytest.raises(ShardCorruptError, match=r"0000001\.(h5|lmdb): .*Copy it again or repack"):
        dataset[7]
    with pytest.raises(ReaderError, match="packed anew while a dataset over it was in use"):
        pickle.loads(shipped)[0]
    fresh = ShardDataset(small_copy.root, decode="bytes")
    assert fresh[0].image == draw_image(50, (9, 8), format="PNG")
    assert fresh[19].image == draw_image(69, (9, 8), format="PNG")
    assert dataset[2].image == small_copy.images[2]


def test_set_removed_while_in_use(small_copy: Any) -> None:
    dataset = ShardDataset(small_copy.root, decode="bytes")
    assert dataset[0].image == small_copy.images[0]
    shutil.rmtree(small_copy.root)
    assert dataset[1].image == small_copy.images[1]
    with pytest.raises(ShardNotFoundError, match="shard 1 of 3 is missing"):
        dataset[7]


# -- repr


def test_repr_tells_what_it_is(small: Any) -> None:
    text = repr(ShardDataset(small.root, str.upper))  # type: ignore[arg-type]
    assert text == (
        f"ShardDataset {small.root}\n"
        f"    20 samples in 3 {small.container} shards\n"
        "    classes: 2\n"
        "    decode: pil\n"
        "    transform: <method 'upper' of 'str' objects>"
    )


def test_subclass_works(small: Any) -> None:
    class Mine(ShardDataset):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index).target

    dataset = Mine(small.root)
    assert [dataset[0], dataset[-1]] == [0, 1]
    assert repr(dataset).startswith("Mine ")
