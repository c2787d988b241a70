"""One contract over both containers: plain libraries read every byte, and equal records give equal bytes."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import h5py
import lmdb
import lmdb.verify
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from packer.items import Record
from packer.publish import OutputFolder
from packer.writers import WRITERS
from packer.writers.hdf5 import _skeleton
from packer.writers.index import BLOCK_ROWS, Finished
from readers.layout import HDF5_MAGIC, INDEX_DTYPE, ROW_BYTES
from readers.shards import LOCATE

CONTAINERS = ("hdf5", "lmdb")
COLUMNS = ("label", "width", "height", "format", "mode", "orientation", "flags")
#: LMDB keeps a value in the page of its key up to about 2 KB, and rounds longer ones up to pages of 4,096.
EDGES = (1, 2, 3, 15, 16, 17, 1999, 2010, 2018, 2019, 2020, 2021, 2022, 2023, 2037, 2038, 2039, 4078, 4079, 4080, 4081,
         4096, 8175, 8176, 8177, 20_000)  # fmt: skip


class Written(NamedTuple):
    """A shard's file and what the writer said of it."""

    path: Path
    finished: Finished


def write(container: str, records: Iterable[Record], folder: Path) -> Written:
    """Write a shard of its own into a new folder."""
    private = OutputFolder(tempfile.mkdtemp(dir=folder)).private_file()
    writer = WRITERS[container](private)
    for record in records:
        writer.add(record)
    finished = writer.finish()
    final = Path(private.path).with_name("shard")
    private.publish(str(final))
    return Written(final, finished)


def record(number: int, image_bytes: int = 100, key: bytes | None = None) -> Record:
    """A record whose bytes and columns all follow from its number."""
    image = (b"%d:" % number + bytes((number + n) % 256 for n in range(min(image_bytes, 300))) * 200)[:image_bytes]
    key = b"class/%07d.jpg" % number if key is None else key
    return Record(image, key, number % 7 - 1, number, number * 3, number % 11, number % 256, number % 9, number % 128)


def plain(container: str, path: Path) -> tuple[list[tuple[bytes, bytes]], Any]:
    """[(image, key)] and the index rows, through h5py or lmdb alone."""
    if container == "hdf5":
        with h5py.File(path, "r") as file:
            rows, data = file["index"][:], file["data"]
            spans = [
                [(int(row[f"{field}_offset"]), int(row[f"{field}_length"])) for field in ("image", "key")]
                for row in rows
            ]
            return [tuple(data[at : at + length].tobytes() for at, length in pair) for pair in spans], rows  # type: ignore[misc]
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        count = json.loads(txn.get(b"header"))["records"]
        blocks = [txn.get(b"index/%06d" % number) for number in range(-(-count // BLOCK_ROWS))]
        rows = np.frombuffer(b"".join(blocks), INDEX_DTYPE)
        return [
            (txn.get(b"%010d/image" % position), txn.get(b"%010d/key" % position)) for position in range(count)
        ], rows


def assert_holds(container: str, written: Written, records: list[Record]) -> None:
    """The shard holds these records, found through plain libraries and through its own index alike."""
    values, rows = plain(container, written.path)
    assert values == [(r.image, r.key) for r in records]
    assert written.finished.records == len(rows) == len(records)
    assert written.finished.payload_bytes == sum(len(r.image) + len(r.key) for r in records)
    assert written.finished.shard_id == blake3(rows.tobytes()).hexdigest(length=16)
    data = written.path.read_bytes()
    geometry = LOCATE[container](lambda length, offset: data[offset : offset + length], len(data))
    assert (geometry.shard_id, geometry.records) == (written.finished.shard_id, len(records))
    for row, r in zip(rows, records, strict=True):
        for field, value in (("image", r.image), ("key", r.key)):
            at = geometry.values_offset + int(row[f"{field}_offset"])
            assert data[at : at + int(row[f"{field}_length"])] == value
            assert int(row[f"{field}_crc32c"]) == google_crc32c.value(value)
        assert [int(row[name]) for name in COLUMNS] == [getattr(r, name) for name in COLUMNS]


# -- the contract


@pytest.mark.parametrize("container", CONTAINERS)
@given(
    values=st.lists(
        st.tuples(st.sampled_from(EDGES) | st.integers(1, 3000), st.sampled_from(EDGES) | st.integers(1, 200)),
        max_size=25,
    )
)
@hypothesis_settings(max_examples=25)
def test_plain_libraries_read_every_byte(
    tmp_path_factory: pytest.TempPathFactory, container: str, values: list[tuple[int, int]]
) -> None:
    records = [record(n, size, bytes([n + 1]) * key_bytes) for n, (size, key_bytes) in enumerate(values)]
    with tempfile.TemporaryDirectory() as folder:
        assert_holds(container, write(container, records, Path(folder)), records)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("count", [0, 1, 2, 1000, BLOCK_ROWS, 2 * BLOCK_ROWS + 5])
def test_any_number_of_records(tmp_path: Path, container: str, count: int) -> None:
    records = [record(n, 5 + n % 3) for n in range(count)]
    written = write(container, records, tmp_path)
    if count > 2000:  # the whole would be slow; the index is what is at its edge
        values, rows = plain(container, written.path)
        assert len(rows) == count
        assert [values[n] for n in (0, count // 2, count - 1)] == [
            (records[n].image, records[n].key) for n in (0, count // 2, count - 1)
        ]
        assert rows["width"].tolist() == list(range(count))
        assert written.finished.shard_id == blake3(rows.tobytes()).hexdigest(length=16)
    else:
        assert_holds(container, written, records)


@pytest.mark.parametrize("container", CONTAINERS)
def test_large_values_and_many_commits(tmp_path: Path, container: str) -> None:
    # 16 MiB are a commit of LMDB's writer: one value just below, one above, one far above, and small ones around.
    sizes = [10, (16 << 20) - 200, 50_000, 17 << 20, 3, 40 << 20, 9_000_000, 9_000_000, 1]
    body = np.random.default_rng(0).bytes(40 << 20)
    records = [record(n)._replace(image=body[:size]) for n, size in enumerate(sizes)]
    written = write(container, records, tmp_path)
    values, rows = plain(container, written.path)
    assert [len(image) for image, _ in values] == sizes
    assert all(image == r.image for (image, _), r in zip(values, records, strict=True))
    assert rows["image_crc32c"].tolist() == [google_crc32c.value(r.image) for r in records]
    assert written.path.stat().st_size < sum(sizes) * 1.01
    if container == "lmdb":
        assert lmdb.verify.verify(str(written.path)) == []


@pytest.mark.parametrize("container", CONTAINERS)
def test_extreme_columns(tmp_path: Path, container: str) -> None:
    low = Record(b"\0", b"k", -(2**63), 0, 0, 0, 0, 0, 0)
    high = Record(b"\xff" * 3, b"\xff" * 4000, 2**63 - 1, 2**32 - 1, 2**32 - 1, 255, 255, 255, 2**16 - 1)
    assert_holds(container, write(container, [low, high, low], tmp_path), [low, high, low])


@pytest.mark.parametrize("container", CONTAINERS)
def test_equal_records_give_equal_bytes(tmp_path: Path, container: str) -> None:
    records = [record(n, EDGES[n % len(EDGES)]) for n in range(3000)]
    first = write(container, records, tmp_path)
    time.sleep(1.1)
    second = write(container, iter(records), tmp_path)
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.finished == second.finished
    other = write(container, [*records[:-1], records[-1]._replace(label=5)], tmp_path)
    assert other.finished.shard_id != first.finished.shard_id


@pytest.mark.parametrize("container", CONTAINERS)
def test_abandoned_files_can_be_dropped(tmp_path: Path, container: str) -> None:
    private = OutputFolder(str(tmp_path)).private_file()
    writer = WRITERS[container](private)
    for n in range(10):
        writer.add(record(n))
    writer.abandon()
    private.discard()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    # The same path may be opened again: LMDB would refuse while an environment is still open.
    again = WRITERS[container](OutputFolder(str(tmp_path)).private_file())
    again.add(record(1))
    again.abandon()


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_header_says_what_the_format_promises(tmp_path: Path, container: str) -> None:
    written = write(container, [record(n) for n in range(3)], tmp_path)
    if container == "hdf5":
        data = written.path.read_bytes()
        magic, length, crc = struct.unpack_from("<8sII", data)
        assert (magic, crc) == (HDF5_MAGIC, google_crc32c.value(data[16 : 16 + length]))
        header = json.loads(data[16 : 16 + length])
    else:
        with lmdb.open(str(written.path), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
            header = json.loads(txn.get(b"header"))
    assert header["format"] == "shardpack"
    assert (header["version"], header["requires"], header["container"]) == (1, [], container)
    assert (header["records"], header["shard_id"]) == (3, written.finished.shard_id)
    assert header["row_bytes"] == ROW_BYTES == 56
    assert header["row"][:3] == [["image_offset", "<u8", 0], ["image_length", "<u4", 8], ["image_crc32c", "<u4", 12]]
    assert header["fields"]["image"] == header["fields"]["key"] == "bytes"


# -- HDF5


def test_hdf5_is_contiguous_unfiltered_and_of_two_objects(tmp_path: Path) -> None:
    for count in (1, 10, 5000):
        with h5py.File(write("hdf5", [record(n) for n in range(count)], tmp_path).path) as file:
            assert sorted(file) == ["data", "index"]
            assert file.userblock_size == 4096
            for name, dtype in (("data", np.dtype("u1")), ("index", INDEX_DTYPE)):
                dataset = file[name]
                plist = dataset.id.get_create_plist()
                assert (dataset.chunks, dataset.compression, plist.get_nfilters()) == (None, None, 0)
                assert dataset.external is None
                assert not dataset.is_virtual
                assert dataset.dtype == dtype
                assert plist.get_layout() == h5py.h5d.CONTIGUOUS
                assert plist.get_fill_time() == h5py.h5d.FILL_TIME_NEVER
                assert dataset.id.get_offset() % 64 == 0
                assert isinstance(file.get(name, getlink=True), h5py.HardLink)
            assert dict(file.attrs) == {"format": "shardpack", "version": 1}


def test_hdf5_header_and_libhdf5_agree_where_things_lie(tmp_path: Path) -> None:
    path = write("hdf5", [record(n, 5000) for n in range(10)], tmp_path).path
    data = path.read_bytes()
    header = json.loads(data[16 : 16 + struct.unpack_from("<I", data, 8)[0]])
    with h5py.File(path) as file:
        for name in ("data", "index"):
            # libhdf5 counts from the end of the user block.
            assert file[name].id.get_offset() in (header[name]["offset"], header[name]["offset"] - 4096)
            raw = data[header[name]["offset"] : header[name]["offset"] + header[name]["size"]]
            assert raw == file[name][:].tobytes()


@pytest.mark.parametrize("data_bytes", [1, 63, 64, 10**6, 2**32, 10**12])
@pytest.mark.parametrize("records", [1, 1000, 10**8])
def test_hdf5_values_begin_at_one_place_whatever_their_size(data_bytes: int, records: int) -> None:
    skeleton = _skeleton(data_bytes, records)
    assert skeleton.data_offset == _skeleton(1, 1).data_offset
    assert skeleton.index_offset >= skeleton.data_offset + data_bytes or skeleton.index_offset < skeleton.data_offset
    assert skeleton.total_bytes >= skeleton.index_offset + records * ROW_BYTES
    taken = [(skeleton.data_offset, data_bytes), (skeleton.index_offset, records * ROW_BYTES)]
    for offset, piece in skeleton.pieces:
        assert all(offset + len(piece) <= at or offset >= at + size for at, size in taken)
    assert sum(len(piece) for _, piece in skeleton.pieces) < 20_000


def test_hdf5_size_is_payload_index_and_a_few_kilobytes(tmp_path: Path) -> None:
    records = [record(n, 1000) for n in range(500)]
    written = write("hdf5", records, tmp_path)
    extra = written.path.stat().st_size - written.finished.payload_bytes - 500 * ROW_BYTES
    assert 4096 <= extra < 12_000


# -- LMDB


@pytest.mark.parametrize("count", [0, 1, 40, 3000])
def test_lmdb_passes_its_own_verifier(tmp_path: Path, count: int) -> None:
    path = write("lmdb", [record(n, EDGES[n % len(EDGES)]) for n in range(count)], tmp_path).path
    assert lmdb.verify.verify(str(path)) == []


def test_lmdb_holds_the_documented_keys_and_no_others(tmp_path: Path) -> None:
    path = write("lmdb", [record(n, 3) for n in range(BLOCK_ROWS + 1)], tmp_path).path
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        keys = list(txn.cursor().iternext(keys=True, values=False))
        assert env.stat()["entries"] == len(keys)
        assert env.info()["map_size"] < 200 << 20
    wanted = [b"%010d/%b" % (n, field) for n in range(BLOCK_ROWS + 1) for field in (b"image", b"key")]
    assert keys == [*wanted, b"header", b"index/000000", b"index/000001"]


def test_lmdb_is_one_file_of_whole_pages(tmp_path: Path) -> None:
    written = write("lmdb", [record(n, 100) for n in range(50)], tmp_path)
    assert [path.name for path in written.path.parent.iterdir()] == ["shard"]
    assert written.path.stat().st_size % 4096 == 0


@pytest.mark.slow
def test_lmdb_map_never_fills(tmp_path: Path) -> None:
    # Values of just over half a page, or over a page, take up to twice their size; two commits of each.
    for size in (1350, 2040, 4081, 12_273):
        records = (record(n, 8)._replace(image=bytes(size), key=bytes([1]) * 2040) for n in range((34 << 20) // size))
        assert write("lmdb", records, tmp_path).finished.records == (34 << 20) // size


@pytest.mark.skipif(os.name == "nt", reason="no modes there")
@pytest.mark.parametrize("container", CONTAINERS)
def test_private_files_are_private_until_published(tmp_path: Path, container: str) -> None:
    private = OutputFolder(str(tmp_path)).private_file()
    writer = WRITERS[container](private)
    writer.add(record(1))
    assert os.stat(private.path).st_mode & 0o777 == 0o600
    writer.abandon()
    private.discard()
