"""readers/lmdb_pages.py against plain lmdb: the same entries from good files, LmdbPageError from bad ones."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readers.lmdb_pages import LmdbFile, LmdbPageError

MIB = 1 << 20
KEYS = st.binary(min_size=1, max_size=511)
# Empty, inline, just below and above the size from which LMDB uses overflow pages, several pages.
VALUES = st.one_of(
    st.just(b""),
    st.binary(max_size=40),
    st.integers(1900, 2100).map(bytes),
    st.integers(3900, 4200).map(lambda n: b"\x5a" * n),
    st.integers(8000, 30_000).map(lambda n: b"\xa5" * n),
)


def write(path: str, *batches: Mapping[bytes, bytes | None]) -> None:
    """One transaction a batch; None deletes."""
    with lmdb.open(path, subdir=False, lock=False, sync=False, map_size=256 * MIB) as env:
        for batch in batches:
            with env.begin(write=True) as txn:
                for key, value in batch.items():
                    if value is None:
                        txn.delete(key)
                    else:
                        txn.put(key, value)


def read_plain(path: str) -> dict[bytes, bytes]:
    with lmdb.open(path, subdir=False, lock=False, readonly=True) as env, env.begin() as txn:
        return dict(txn.cursor())


@contextlib.contextmanager
def ours(path: str) -> Iterator[tuple[LmdbFile, int]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield LmdbFile(lambda length, offset: os.pread(fd, length, offset), os.fstat(fd).st_size), fd
    finally:
        os.close(fd)


def check_equal(path: str) -> None:
    expected = read_plain(path)
    with ours(path) as (file, fd):
        found = [(key, os.pread(fd, place.length, place.offset)) for key, place in file.items()]
        assert found == list(expected.items())
        for key, value in expected.items():
            place = file.find(key)
            assert place is not None
            assert os.pread(fd, place.length, place.offset) == value
        for key in expected:
            for other in (key + b"\0", key[:-1], key[:-1] + bytes([key[-1] ^ 1])):
                if other not in expected:
                    assert file.find(other) is None


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "data.lmdb")


# -- good files


@settings(max_examples=60)
@given(st.lists(st.dictionaries(KEYS, VALUES, min_size=1, max_size=12), min_size=1, max_size=4), st.data())
def test_random_databases_read_as_with_lmdb(batches: list[dict[bytes, bytes]], data: st.DataObject) -> None:
    keys = sorted({key for batch in batches for key in batch})
    deleted = data.draw(st.sets(st.sampled_from(keys), max_size=len(keys) - 1)) if len(keys) > 1 else set()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/data.lmdb"
        write(path, *batches, dict.fromkeys(deleted))
        check_equal(path)


@pytest.mark.parametrize("count", [1, 2, 50, 1500])
def test_trees_of_one_to_three_levels(path: str, count: int) -> None:
    rng = random.Random(count)
    write(path, {b"%010d/%s" % (n, rng.randbytes(60)): rng.randbytes(rng.randrange(300)) for n in range(count)})
    check_equal(path)


def test_every_value_length_around_the_overflow_limit(path: str) -> None:
    write(path, {b"%05d" % length: bytes([length % 251]) * length for length in range(1950, 2100)})
    check_equal(path)


def test_value_over_many_pages(path: str) -> None:
    write(path, {b"big": random.Random(0).randbytes(3 * MIB), b"small": b"x"})
    check_equal(path)


def test_keys_appended_in_order_as_the_packer_does(path: str) -> None:
    with lmdb.open(path, subdir=False, lock=False, sync=False, map_size=256 * MIB) as env:
        for start in range(0, 800, 200):
            with env.begin(write=True) as txn:
                for number in range(start, start + 200):
                    txn.put(b"%010d/image" % number, b"i" * (number % 3000), append=True)
                    txn.put(b"%010d/key" % number, b"k%d" % number, append=True)
    check_equal(path)


def test_newest_of_the_two_meta_pages_counts(path: str) -> None:
    for number in range(5):
        write(path, {b"x": b"%d" % number})
        check_equal(path)


def test_database_without_entries_has_none(path: str) -> None:
    write(path, {})
    assert read_plain(path) == {}
    with ours(path) as (file, _):
        assert file.find(b"x") is None
        assert list(file.items()) == []


def test_database_emptied_again_has_none(path: str) -> None:
    write(path, {b"x": b"y"}, {b"x": None})
    assert read_plain(path) == {}
    with ours(path) as (file, _):
        assert file.find(b"x") is None


# -- bad files


def damaged_read(data: bytes, keys: list[bytes]) -> dict[bytes, bytes] | None:
    """All entries of a file's bytes; None if it was refused. Any other exception passes, and fails the test."""
    try:
        file = LmdbFile(lambda length, offset: data[offset : offset + length], len(data))
        found = {}
        for key, place in file.items():
            assert 0 <= place.offset <= place.offset + place.length <= len(data)
            found[key] = data[place.offset : place.offset + place.length]
    except LmdbPageError:
        found = None
    for key in keys:
        with contextlib.suppress(LmdbPageError):
            place = LmdbFile(lambda length, offset: data[offset : offset + length], len(data)).find(key)
            assert place is None or place.offset + place.length <= len(data)
    return found


@pytest.fixture(scope="module")
def sample() -> tuple[bytes, list[bytes]]:
    """A file with two levels, inline and overflow values."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/data.lmdb"
        rng = random.Random(3)
        entries = {b"%04d/%s" % (n, b"k" * 40): rng.randbytes([0, 20, 300, 2500, 9000][n % 5]) for n in range(60)}
        write(path, {**entries, b"header": b"{}"})
        return Path(path).read_bytes(), [b"header", b"0000", *list(entries)[:3], b"zzz"]


def test_undamaged_sample_reads(sample: tuple[bytes, list[bytes]]) -> None:
    data, keys = sample
    found = damaged_read(data, keys)
    assert found is not None
    assert len(found) == 61


@settings(max_examples=200)
@given(st.data())
def test_mutated_pages_raise_nothing_but_lmdb_page_error(
    sample: tuple[bytes, list[bytes]], data: st.DataObject
) -> None:
    original, keys = sample
    mutated = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        page = data.draw(st.integers(0, len(original) // 4096 - 1))
        # Headers, pointers and nodes are where the structure is: the start and the end of a page.
        at = page * 4096 + data.draw(st.one_of(st.integers(0, 160), st.integers(0, 4095)))
        kind = data.draw(st.sampled_from(["<B", "<H", "<I", "<Q"]))
        at = min(at, len(mutated) - struct.calcsize(kind))
        value = data.draw(st.integers(0, 256 ** struct.calcsize(kind) - 1))
        struct.pack_into(kind, mutated, at, value)
    damaged_read(bytes(mutated), keys)


def test_every_byte_of_the_structure_set_to_extremes(sample: tuple[bytes, list[bytes]]) -> None:
    original, keys = sample
    for page in range(len(original) // 4096):
        for at in range(page * 4096, page * 4096 + 32):
            for value in (0xFF, original[at] ^ 1):
                mutated = bytearray(original)
                mutated[at] = value
                damaged_read(bytes(mutated), keys[:1])


def test_cut_file_is_refused_or_read_right(sample: tuple[bytes, list[bytes]]) -> None:
    original, keys = sample
    whole = damaged_read(original, keys)
    for length in [*range(0, 9000, 97), *range(9000, len(original), 1021), len(original) - 1]:
        found = damaged_read(original[:length], keys[:1])
        assert found is None or found == whole


@given(st.binary(max_size=400))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(LmdbPageError):
        LmdbFile(lambda length, offset: data[offset : offset + length], len(data)).find(b"x")


def test_page_that_is_its_own_child_is_refused(sample: tuple[bytes, list[bytes]]) -> None:
    original, _ = sample
    root = root_page(original)
    mutated = bytearray(original)
    base = root * 4096
    assert struct.unpack_from("<H", original, base + 10)[0] & 1, "the sample's root is a branch page"
    lower = struct.unpack_from("<H", original, base + 12)[0]
    for (node,) in struct.iter_unpack("<H", original[base + 16 : base + lower]):
        struct.pack_into("<HHH", mutated, base + node, root & 0xFFFF, root >> 16, 0)
    for key in (b"header", b"", b"zzz"):
        with pytest.raises(LmdbPageError, match="deeper"):
            LmdbFile(lambda length, offset: bytes(mutated[offset : offset + length]), len(mutated)).find(key)
    assert damaged_read(bytes(mutated), []) is None


def test_page_in_the_place_of_another_is_refused(sample: tuple[bytes, list[bytes]]) -> None:
    """As a disk does that writes to the wrong sector: every page is good, and one is not where it belongs."""
    original, _ = sample
    leaves = [
        page for page in range(2, len(original) // 4096)
        if struct.unpack_from("<QHH", original, page * 4096)[::2] == (page, 2)
    ]  # fmt: skip
    assert len(leaves) > 1
    mutated = bytearray(original)
    for here, there in zip(leaves, leaves[1:] + leaves[:1], strict=True):
        mutated[here * 4096 : here * 4096 + 4096] = original[there * 4096 : there * 4096 + 4096]
    assert damaged_read(bytes(mutated), []) is None
    with pytest.raises(LmdbPageError):
        LmdbFile(lambda length, offset: bytes(mutated[offset : offset + length]), len(mutated)).find(b"0000")


def root_page(data: bytes) -> int:
    """Of the newer meta page: header 16, magic and version 8, address and map size 16, free list 48, then main."""
    metas = []
    for page in (0, 4096):
        root = struct.unpack_from("<Q", data, page + 88 + 40)[0]
        metas.append((struct.unpack_from("<Q", data, page + 136 + 8)[0], root))
    return int(max(metas)[1])
