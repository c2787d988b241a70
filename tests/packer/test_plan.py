"""`packer/plan.py`: a pure decision, so any stream of candidates will do."""

from __future__ import annotations

from itertools import groupby, islice, repeat

from hypothesis import given
from hypothesis import strategies as st

from packer.items import UNKNOWN, SourceImage
from packer.plan import assign_shards

IMAGES = st.lists(
    st.builds(SourceImage, st.binary(min_size=1, max_size=20), st.integers(-1, 5), st.integers(0, 300), st.just(0)),
    max_size=60,
)


def shards_of(images: list[SourceImage], **limits: int | None) -> list[list[SourceImage]]:
    """The candidates of each shard; checks that numbers count up from 0 without a gap."""
    pairs = list(assign_shards(images, **{"shard_bytes": None, "shard_records": None, **limits}))
    groups = [(number, [image for _, image in group]) for number, group in groupby(pairs, key=lambda pair: pair[0])]
    assert [number for number, _ in groups] == list(range(len(groups)))
    return [group for _, group in groups]


def size_of(shard: list[SourceImage]) -> int:
    """Bytes of images and keys."""
    return sum(image.size + len(image.key) for image in shard)


@given(images=IMAGES, shard_bytes=st.integers(1, 1000))
def test_by_bytes(images: list[SourceImage], shard_bytes: int) -> None:
    shards = shards_of(images, shard_bytes=shard_bytes)
    assert [image for shard in shards for image in shard] == images
    for shard, following in zip(shards, [*shards[1:], []], strict=False):
        assert len(shard) == 1 or size_of(shard) <= shard_bytes
        # Filled one after the other: the next one's first candidate did not fit.
        assert not following or size_of([*shard, following[0]]) > shard_bytes


@given(images=IMAGES, shard_records=st.integers(1, 70))
def test_by_count(images: list[SourceImage], shard_records: int) -> None:
    shards = shards_of(images, shard_records=shard_records)
    assert [image for shard in shards for image in shard] == images
    assert [len(shard) for shard in shards[:-1]] == [shard_records] * (len(shards) - 1)
    assert all(0 < len(shard) <= shard_records for shard in shards)


@given(images=IMAGES, shard_records=st.integers(1, 70))
def test_by_count_looks_at_no_size(images: list[SourceImage], shard_records: int) -> None:
    unknown = [image._replace(size=UNKNOWN) for image in images]
    assert [len(shard) for shard in shards_of(unknown, shard_records=shard_records)] == [
        len(shard) for shard in shards_of(images, shard_records=shard_records)
    ]


@given(images=IMAGES, shard_bytes=st.integers(1, 1000), cut=st.integers(0, 60))
def test_what_comes_later_changes_no_earlier_shard(images: list[SourceImage], shard_bytes: int, cut: int) -> None:
    whole = list(assign_shards(images, shard_bytes=shard_bytes, shard_records=None))
    assert list(assign_shards(images[:cut], shard_bytes=shard_bytes, shard_records=None)) == whole[:cut]


def test_larger_than_a_shard_gets_its_own() -> None:
    small, large = SourceImage(b"s", 0, 9, 0), SourceImage(b"l", 0, 500, 0)
    assert [len(shard) for shard in shards_of([small, small, large, small, large, large], shard_bytes=20)] == [
        2, 1, 1, 1, 1,
    ]  # fmt: skip


def test_exactly_full_is_not_over() -> None:
    image = SourceImage(b"k", 0, 9, 0)
    assert [len(shard) for shard in shards_of([image] * 5, shard_bytes=20)] == [2, 2, 1]


def test_empty_files_fill_a_shard_by_their_keys() -> None:
    assert [len(s) for s in shards_of([SourceImage(b"0123456789", 0, 0, 0)] * 5, shard_bytes=25)] == [2, 2, 1]


def test_streams_without_looking_ahead() -> None:
    endless = assign_shards(repeat(SourceImage(b"k", 0, 9, 0)), shard_bytes=100, shard_records=None)
    assert [number for number, _ in islice(endless, 25)] == [n // 10 for n in range(25)]
