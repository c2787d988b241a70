"""readers/shards/: a damaged, short, foreign or future shard raises a typed error or gives the right bytes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readers import ShardDataset
from readers.errors import ReaderError, RecordCorruptError, ShardCorruptError, ShardNotFoundError
from readers.handles import Shard
from readers.layout import FIELDS, HDF5_MAGIC, HDF5_PREFIX, INDEX_DTYPE, NO_LABEL, digest, row_layout
from readers.manifest import Manifest
from readers.shards import LOCATE, ShardFormatError


class Reader:
    """Opens a shard and reads all of it, again and again: right bytes or a typed error, nothing else."""

    def __init__(self, packed: Any, number: int = 0) -> None:
        self.facts = packed.facts(number)
        self.path = packed.shard_file(number)
        first = Manifest.load(packed.root).first_index(number)
        span = slice(first, first + self.facts["records"])
        self.labels = packed.labels[span]
        self.keys = [os.fsencode(key) for key in packed.keys[span]]
        self.images = packed.images[span]

    def errors(self, **changes: Any) -> int:
        """How many errors there were; ``changes`` replace what the manifest says."""
        try:
            shard = Shard(**(self.facts | changes))
        except ShardCorruptError as error:
            shard, message = None, str(error)
        if shard is None:
            assert self.path.name in message
            return 1
        assert shard.rows()["label"].tolist() == self.labels
        return sum(self._is_damaged(shard, position) for position in range(shard.records))

    def _is_damaged(self, shard: Shard, position: int) -> bool:
        try:
            record = *shard.image(position), shard.key(position)
        except RecordCorruptError as error:
            damage = error
        else:
            assert record == (self.images[position], self.labels[position], self.keys[position])
            return False
        assert damage.position == position
        assert damage.key in (None, self.keys[position])
        return True


@pytest.fixture
def tiny(container: str, tmp_path: Path, pack_files: Callable[..., Any], draw_image: Callable[..., bytes]) -> Any:
    """A shard of three pictures, to be damaged."""
    files = {f"{name}/1.png": draw_image(ord(name), (3, 2), format="PNG") for name in "abc"}
    return pack_files(tmp_path, files, container)


def test_undamaged_shards_read_right(small: Any) -> None:
    assert [Reader(small, number).errors() for number in range(3)] == [0, 0, 0]


def test_shard_cut_at_every_byte(tiny: Any) -> None:
    """Past the manifest's size check, which catches this first: the header must not be trusted either."""
    reader = Reader(tiny)
    for length in range(reader.facts["file_bytes"] - 1, -1, -1):  # every byte: a cut costs next to nothing
        os.truncate(reader.path, length)
        errors = reader.errors(file_bytes=length)
    assert errors == 1


def test_dataset_refuses_a_cut_shard_at_every_length(tiny: Any) -> None:
    path = tiny.shard_file(0)
    for length in [*range(path.stat().st_size - 1, 0, -211), 0]:
        os.truncate(path, length)
        with pytest.raises(ShardCorruptError, match=f"{path.name}: {length:,} bytes, but the manifest says"):
            ShardDataset(tiny.root)


def test_longer_shard_is_refused(tiny: Any) -> None:
    with open(tiny.shard_file(0), "ab") as file:
        file.write(b"\0")
    with pytest.raises(ShardCorruptError, match="but the manifest says"):
        ShardDataset(tiny.root)


def flip(tiny: Any, bits: range, spans: list[tuple[int, int]]) -> Iterator[int]:
    """Errors after each flip of one of ``bits`` in each byte of ``spans``; the file is whole again afterwards."""
    reader = Reader(tiny)
    data = reader.path.read_bytes()
    with open(reader.path, "r+b", buffering=0) as file:
        for start, length in spans:
            for at in range(start, start + length):
                for bit in bits:
                    os.pwrite(file.fileno(), bytes([data[at] ^ 1 << bit]), at)
                    yield reader.errors()
                os.pwrite(file.fileno(), data[at : at + 1], at)
    assert reader.errors() == 0


def test_one_bit_flipped_in_every_fifth_byte(tiny: Any) -> None:
    assert max(flip(tiny, range(1), [(at, 1) for at in range(0, tiny.facts()["file_bytes"], 5)])) >= 1


@pytest.mark.slow
def test_three_bits_of_every_byte_flipped(tiny: Any) -> None:
    assert max(flip(tiny, range(1, 8, 3), [(0, tiny.facts()["file_bytes"])])) >= 1


def test_flips_in_values_and_index_are_all_noticed(tiny: Any) -> None:
    """Where the bytes matter no flip may pass; elsewhere (HDF5's own structure, padding) it changes nothing."""
    shard = tiny.open()
    rows = shard.rows().copy()
    spans = [
        (shard.values_offset + int(row[f"{field}_offset"]), int(row[f"{field}_length"]))
        for row in rows
        for field in ("image", "key")
    ]
    spans.append((tiny.shard_file(0).read_bytes().index(rows.tobytes()), rows.nbytes))
    del shard
    assert min(flip(tiny, range(4, 5), spans)) >= 1


@settings(max_examples=60)
@given(st.data())
def test_larger_damage(
    small_sets: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Blocks zeroed, moved or made random, as broken disks and copies do."""
    small = small_sets[data.draw(st.sampled_from(["hdf5", "lmdb"]))]
    copy = small._replace(root=tmp_path_factory.mktemp("damage"))
    shutil.copytree(small.root, copy.root, dirs_exist_ok=True)
    path = copy.shard_file(1)
    content = bytearray(path.read_bytes())
    length = data.draw(st.sampled_from([8, 56, 512, 4096]))
    at, source = (data.draw(st.integers(0, len(content) - length)) for _ in range(2))
    kind = data.draw(st.sampled_from(["zeros", "ones", "moved"]))
    content[at : at + length] = {
        "zeros": bytes(length), "ones": b"\xff" * length, "moved": content[source : source + length],
    }[kind]  # fmt: skip
    path.write_bytes(content)
    Reader(copy, 1).errors()
    shutil.rmtree(copy.root)


# -- shards that are good, but not these


def test_swapped_shards_are_refused(small_copy: Any) -> None:
    first, second = small_copy.shard_file(0), small_copy.shard_file(1)
    first.rename(first.with_suffix(".tmp"))
    second.rename(first)
    first.with_suffix(".tmp").rename(second)
    with pytest.raises(ShardCorruptError):  # already the constructor, where their sizes differ
        ShardDataset(small_copy.root)[0]
    with pytest.raises(ShardCorruptError, match="swapped or mixed"):
        small_copy.open(0, file_bytes=first.stat().st_size)


def test_shard_of_another_set_is_refused(
    small_copy: Any, tmp_path: Path, pack_files: Callable[..., Any], draw_image: Callable[..., bytes]
) -> None:
    files = {key: draw_image(99, (9, 8), format="PNG") for key in small_copy.keys}
    other = pack_files(tmp_path / "other", files, small_copy.container, shard_records=7)
    shutil.copy(other.shard_file(0), small_copy.shard_file(0))
    with pytest.raises(ShardCorruptError, match="swapped or mixed"):
        small_copy.open(0, file_bytes=small_copy.shard_file(0).stat().st_size)


def test_shard_of_the_other_container_is_refused(small_copy: Any, small_sets: dict[str, Any]) -> None:
    other = small_sets["lmdb" if small_copy.container == "hdf5" else "hdf5"]
    shutil.copy(other.shard_file(0), small_copy.shard_file(0))
    with pytest.raises(ShardCorruptError):
        small_copy.open(0, file_bytes=small_copy.shard_file(0).stat().st_size)


def test_missing_shard_is_named_when_the_set_is_opened(small_copy: Any) -> None:
    small_copy.shard_file(1).unlink()
    with pytest.raises(ShardNotFoundError, match="shard 1 of 3 is missing") as caught:
        ShardDataset(small_copy.root)
    assert str(small_copy.shard_file(1)) in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_shard_that_goes_missing_later_is_named_when_it_is_read(small_copy: Any) -> None:
    dataset = ShardDataset(small_copy.root)
    assert dataset[0]
    small_copy.shard_file(1).unlink()
    assert dataset[6]
    with pytest.raises(ShardNotFoundError, match="shard 1 of 3 is missing"):
        dataset[7]


def test_record_error_names_shard_record_key_and_index(small_copy: Any) -> None:
    path = small_copy.shard_file(1)
    data = bytearray(path.read_bytes())
    at = data.index(small_copy.images[9]) + len(small_copy.images[9]) // 2
    data[at] ^= 1
    path.write_bytes(data)
    dataset = ShardDataset(small_copy.root, decode="bytes")
    with pytest.raises(RecordCorruptError, match="checksum") as caught:
        dataset[9]
    error = caught.value
    assert (error.shard_path, error.position, error.key) == (str(path), 2, os.fsencode(small_copy.keys[9]))
    assert repr(small_copy.keys[9]) in str(error)
    assert "sample index 9" in "".join(error.__notes__)
    assert isinstance(error, ReaderError)
    assert isinstance(error, ValueError)
    assert [dataset[i].image for i in (7, 8, 10)] == [small_copy.images[i] for i in (7, 8, 10)]
    assert dataset.key(9) == small_copy.keys[9]


def test_damaged_key_does_not_hide_the_image(small_copy: Any) -> None:
    path = small_copy.shard_file(0)
    data = bytearray(path.read_bytes())
    places = small_copy.open(0).rows()["key_offset"] + small_copy.open(0).values_offset
    data[int(places[3])] ^= 1
    path.write_bytes(data)
    dataset = ShardDataset(small_copy.root, decode="bytes")
    assert dataset[3].image == small_copy.images[3]
    with pytest.raises(RecordCorruptError, match="'key'"):
        dataset.key(3)


# -- headers that are well made and say something else


def hdf5_with_header(header: object, size: int = 8192) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (HDF5_PREFIX.pack(HDF5_MAGIC, len(text), google_crc32c.value(text)) + text).ljust(size, b"\0")


def header(**changes: Any) -> dict[str, Any]:
    return {
        "format": "shardpack", "version": 1, "requires": [], "container": "hdf5", "shard_id": "0" * 32, "records": 2,
        "fields": dict(FIELDS), "row_bytes": 56, "row": row_layout(),
        "data": {"offset": 4096, "size": 1000}, "index": {"offset": 5120, "size": 112},
    } | changes  # fmt: skip


def locate_hdf5(data: bytes) -> Any:
    return LOCATE["hdf5"](lambda length, offset: data[offset : offset + length], len(data))


def test_header_as_written_is_accepted() -> None:
    geometry = locate_hdf5(hdf5_with_header(header()))
    assert (geometry.records, geometry.index_blocks, geometry.values_offset) == (2, (5120,), 4096)


def test_header_larger_than_the_usual_block_is_read() -> None:
    assert locate_hdf5(hdf5_with_header(header(later="x" * 6000), 20_000)).records == 2


BAD_HEADERS: list[dict[str, Any]] = [
    *({name: bad} for name in ("format", "container") for bad in (None, 1, "x", [], {})),
    *({"version": bad} for bad in (None, 0, 2, "1", [], {})),
    *({"requires": bad} for bad in (None, 1, ["zstd"], [[]], [1, "a"], [{}])),
    *({"shard_id": bad} for bad in (None, 1, [], {})),
    *({"records": bad} for bad in (None, -1, 1.0, True, "2", 3, 2**63, 10**30, [], {})),
    *({"fields": bad} for bad in (None, 1, "image", [], ["image"], {}, {"image": "bytes"}, {**FIELDS, "label": "u8"})),
    *({"row_bytes": bad} for bad in (None, 0, 48, "56", [])),
    *({"row": bad} for bad in (None, [], {}, "x", row_layout()[:-1], [[1, 2, 3]])),
    *({name: bad} for name in ("data", "index") for bad in (None, 1, [], {}, {"offset": 0}, {"size": 1})),
    *(
        {name: {"offset": offset, "size": size}}
        for name, good in (("data", 1000), ("index", 112))
        for offset, size in (
            (-1, good), (8193, 0), (8192, good), (0, -1), (0, 2**64), (2**64, good), (None, good), (0, None),
            ("0", good), (0, str(good)), (0.0, good), ([], good), (8192 - good + 1, good), (True, good),
        )
    ),
    {"index": {"offset": 5120, "size": 56}},
    {"index": {"offset": 5120, "size": 113}},
]  # fmt: skip


@pytest.mark.parametrize("change", BAD_HEADERS, ids=lambda change: repr(change)[:50])
def test_bad_header_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ShardFormatError) as caught:
        locate_hdf5(hdf5_with_header(header(**change)))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", list(header()))
def test_header_without_a_member_is_refused(name: str) -> None:
    said = header()
    del said[name]
    with pytest.raises(ShardFormatError):
        locate_hdf5(hdf5_with_header(said))


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b"7", b"{", b"\xff", b"[" * 3000, b'{"format":' * 500, b"NaN"])
def test_header_that_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(ShardFormatError):
        locate_hdf5(hdf5_with_header(text))


def test_header_that_claims_to_be_huge_is_refused_before_it_is_read() -> None:
    asked: list[int] = []

    def read(length: int, offset: int) -> bytes:
        asked.append(length)
        return HDF5_PREFIX.pack(HDF5_MAGIC, 2**32 - 1, 0).ljust(length, b"\0")

    with pytest.raises(ShardFormatError, match="4,294,967,295 bytes"):
        LOCATE["hdf5"](read, 2**40)
    assert max(asked) <= 4096


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.integers(0, 9000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["offset", "size", "x"]), inner),
    max_leaves=6,
)


@settings(max_examples=200)
@given(st.sampled_from(list(header())), JSON)
def test_any_value_in_the_header_is_read_or_refused(name: str, value: object) -> None:
    try:
        geometry = locate_hdf5(hdf5_with_header(header(**{name: value})))
    except ShardFormatError:
        return
    assert 0 <= geometry.values_offset <= geometry.values_offset + geometry.values_bytes <= 8192
    assert all(0 <= offset <= 8192 - 56 * geometry.records for offset in geometry.index_blocks)


def test_future_version_says_what_to_do(small_copy: Any) -> None:
    path = small_copy.shard_file(0)
    data = path.read_bytes()
    if small_copy.container == "hdf5":
        _, length, _ = HDF5_PREFIX.unpack_from(data)
        text = data[HDF5_PREFIX.size :][:length].replace(b'"version":1', b'"version":2')
        data = hdf5_with_header(text, 4096) + data[4096:]
    else:
        data = data.replace(b'"version":1', b'"version":2')
    path.write_bytes(data)
    with pytest.raises(ShardCorruptError, match=r"format version 2; this reader knows 1\. Upgrade"):
        ShardDataset(small_copy.root)[0]


def test_index_rows_that_point_outside_are_refused_without_reading(small_copy: Any) -> None:
    """A hostile index with the right checksum: lengths are checked before they are asked for."""
    rows = np.zeros(2, INDEX_DTYPE)
    rows["image_length"] = [2**32 - 1, 0]
    rows["image_offset"] = [0, 2**64 - 1]
    rows["key_offset"] = 2**63
    rows["label"] = NO_LABEL
    data = bytearray(hdf5_with_header(header(shard_id=digest(rows.tobytes()))))
    data[5120 : 5120 + rows.nbytes] = rows.tobytes()
    path = small_copy.root / "hostile.h5"
    path.write_bytes(data)
    shard = Shard(str(path), digest(rows.tobytes()), 2, len(data), "hdf5")
    for position in range(2):
        for read in (shard.image, shard.key):
            with pytest.raises(RecordCorruptError):
                read(position)
