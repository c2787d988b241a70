"""`packer/external_sort.py` and `packer/shuffle.py`: sorted as `sorted` would, with little in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer import external_sort as module
from packer.external_sort import external_sort
from packer.items import SourceImage
from packer.shuffle import shuffled
from readers.layout import shuffle_key

#: Text as file names hold it: any character, and lone surrogates for bytes that are not UTF-8.
NAMES = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), max_size=8)
ODD_NAMES = st.lists(NAMES | st.binary(max_size=6).map(lambda raw: raw.decode("utf-8", "surrogateescape")), max_size=40)


class Scratch:
    """Opens temporary files and counts them."""

    def __init__(self) -> None:
        self.files: list[IO[bytes]] = []
        self.most_open = 0

    def __call__(self) -> IO[bytes]:
        self.files.append(tempfile.TemporaryFile())  # noqa: SIM115  closed by what is tested
        self.most_open = max(self.most_open, sum(not file.closed for file in self.files))
        return self.files[-1]

    @property
    def all_closed(self) -> bool:
        return all(file.closed for file in self.files)


@given(rows=ODD_NAMES, in_memory=st.integers(1, 50))
def test_text_as_sorted_would(rows: list[str], in_memory: int) -> None:
    scratch = Scratch()
    assert list(external_sort(rows, scratch, in_memory=in_memory)) == sorted(rows)
    assert scratch.all_closed


@given(
    rows=st.lists(st.tuples(st.sampled_from("abc"), NAMES, st.integers(-1, 2**63 - 1)).map(list), max_size=40),
    in_memory=st.integers(1, 10),
)
def test_lists_by_key_and_ties_in_their_order(rows: list[list[Any]], in_memory: int) -> None:
    found = list(external_sort(rows, Scratch(), key=lambda row: row[0], in_memory=in_memory))
    assert found == sorted(rows, key=lambda row: row[0])


@pytest.mark.parametrize(("count", "files"), [(0, False), (9, False), (10, False), (11, True), (99, True)])
def test_files_only_for_more_than_memory_holds(count: int, files: bool) -> None:
    scratch = Scratch()
    rows = [f"{n:03d}" for n in reversed(range(count))]
    assert list(external_sort(rows, scratch, in_memory=10)) == sorted(rows)
    assert bool(scratch.files) == files
    assert scratch.all_closed


@given(rows=st.lists(st.integers(0, 5).map(str), min_size=1, max_size=60))
def test_many_runs_are_merged_in_steps(rows: list[str]) -> None:
    scratch = Scratch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FAN_IN", 3)
        assert list(external_sort(rows, scratch, in_memory=1)) == sorted(rows)
    assert scratch.all_closed


def test_descriptors_are_bounded() -> None:
    # 500 runs: a billion rows make 10,000, and 1,024 descriptors are what most systems allow.
    scratch = Scratch()
    rows = [f"{n:05d}" for n in range(1000)]
    assert list(external_sort(reversed(rows), scratch, in_memory=2)) == rows
    assert scratch.all_closed
    assert scratch.most_open <= 130


def test_files_are_closed_when_nobody_reads_on() -> None:
    scratch = Scratch()
    rows = external_sort(map(str, range(100)), scratch, in_memory=10)
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    assert scratch.files
    assert scratch.all_closed


def test_files_are_closed_when_the_rows_fail() -> None:
    scratch = Scratch()

    def rows() -> Any:
        yield from map(str, range(50))
        raise LookupError

    with pytest.raises(LookupError):
        list(external_sort(rows(), scratch, in_memory=10))
    assert scratch.all_closed


# -- the stored shuffle


@given(keys=st.lists(st.binary(min_size=1, max_size=12), unique=True, max_size=40), seed=st.integers(0, 2**70))
def test_shuffle_is_a_permutation_by_the_documented_key(keys: list[bytes], seed: int) -> None:
    images = [SourceImage(key, n % 3, n, n * 10**9) for n, key in enumerate(keys)]
    found = list(shuffled(images, seed, tempfile.TemporaryFile))
    assert found == sorted(images, key=lambda image: (shuffle_key(image.key, seed), image.key))


def test_seeds_give_orders_of_their_own(tmp_path: Path) -> None:
    images = [SourceImage(b"%d" % n, 0, 0, 0) for n in range(50)]
    orders = {tuple(image.key for image in shuffled(images, seed, tempfile.TemporaryFile)) for seed in range(20)}
    assert len(orders) == 20
