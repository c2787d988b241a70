"""readers/layout.py: the numbers on disk, said twice."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from readers import handles, imaging, layout
from readers.manifest import Manifest

UNSIGNED = {"u1": 8, "u2": 16, "u4": 32, "u8": 64}


def column(kind: str) -> st.SearchStrategy[int]:
    if kind.endswith("i8"):
        return st.integers(-(2**63), 2**63 - 1)
    return st.integers(0, 2 ** UNSIGNED[kind.lstrip("<|")] - 1)


ROWS = st.tuples(*(column(kind) for _, kind, _ in layout.row_layout()))


def numpy_row(values: tuple[int, ...]) -> np.ndarray[Any, Any]:
    row = np.zeros(1, layout.INDEX_DTYPE)
    row[0] = values
    return row


def test_row_is_56_bytes_in_struct_numpy_and_header() -> None:
    assert layout.ROW.size == layout.INDEX_DTYPE.itemsize == layout.ROW_BYTES == 56


@given(ROWS)
def test_struct_row_equals_numpy_row(values: tuple[int, ...]) -> None:
    packed = layout.ROW.pack(*values)
    assert packed == numpy_row(values).tobytes()
    assert layout.ROW.unpack(packed) == values


@given(ROWS)
def test_readers_part_structs_take_the_right_columns(values: tuple[int, ...]) -> None:
    row = dict(zip(layout.INDEX_DTYPE.names or (), values, strict=True))
    packed = layout.ROW.pack(*values)
    image = tuple(row[name] for name in ("image_offset", "image_length", "image_crc32c", "label"))
    key = tuple(row[name] for name in ("key_offset", "key_length", "key_crc32c"))
    assert handles._IMAGE_ROW.unpack_from(packed) == image
    assert handles._KEY_ROW.unpack_from(packed) == key


def test_header_in_the_file_describes_the_row(small: Any) -> None:
    header = read_header(small)
    assert header["row_bytes"] == 56
    described = np.dtype(
        {
            "names": [name for name, _, _ in header["row"]],
            "formats": [kind for _, kind, _ in header["row"]],
            "offsets": [offset for _, _, offset in header["row"]],
            "itemsize": header["row_bytes"],
        }
    )
    assert described == layout.INDEX_DTYPE
    assert header["fields"] == dict(layout.FIELDS)
    assert header["shard_id"] == Manifest.load(small.root).shard_ids[0]


def read_header(small: Any) -> dict[str, Any]:
    data = small.shard_file(0).read_bytes()
    if small.container == "hdf5":
        magic, length, crc = layout.HDF5_PREFIX.unpack_from(data)
        text = data[layout.HDF5_PREFIX.size :][:length]
        assert (magic, crc) == (layout.HDF5_MAGIC, google_crc32c.value(text))
    else:
        start = data.index(b'{"format":"shardpack"')
        text = data[start : data.index(b"\n", start)]
    return dict(json.loads(text))


def test_every_field_has_its_columns() -> None:
    columns = set(layout.INDEX_DTYPE.names or ())
    for name, kind in layout.FIELDS.items():
        parts = {f"{name}_offset", f"{name}_length", f"{name}_crc32c"} if kind == "bytes" else {name}
        assert parts <= columns
        columns -= parts
    assert not columns


def test_codes_are_distinct_and_fit_their_columns() -> None:
    for codes, most in ((layout.FORMAT_CODES, 255), (layout.MODE_CODES, 255)):
        assert len(set(codes.values())) == len(codes)
        assert all(0 < code <= most for code in codes.values())
    bits = list(layout.FLAGS.values())
    assert all(bit & (bit - 1) == 0 and bit < 2**16 for bit in bits)
    assert sum(bits) == int(np.bitwise_or.reduce(bits))


def test_every_format_that_is_recognised_has_a_code() -> None:
    named = {name for _, name in imaging._MAGIC} | {"WEBP", "AVIF", "PPM"}
    assert named <= set(layout.FORMAT_CODES)


# -- keys


@given(st.binary(min_size=1, max_size=80))
def test_key_survives_json(key: bytes) -> None:
    line = layout.canonical_json(layout.key_to_json(key))
    assert line.isascii()
    assert line.count(b"\n") == 1
    member = json.loads(line)
    assert layout.key_from_json(member) == key
    assert layout.key_from_json({"key": member["key"]}) == key


@given(st.text(min_size=1))
def test_key_that_is_utf8_needs_no_hex(text: str) -> None:
    try:
        key = text.encode()
    except UnicodeEncodeError:
        return
    assert layout.key_to_json(key) == {"key": text}


@given(st.binary(max_size=80))
def test_key_to_str_is_what_the_system_calls_the_file(key: bytes) -> None:
    assert layout.key_to_str(key) == os.fsdecode(key)
    assert os.fsencode(layout.key_to_str(key)) == key


def test_key_with_broken_utf8_appears_twice_in_json() -> None:
    assert layout.key_to_json(b"a/\xff.jpg") == {"key": "a/\udcff.jpg", "key_hex": "612fff2e6a7067"}


# -- names


@pytest.mark.parametrize(
    ("number", "container", "name"),
    [
        (0, "hdf5", "shards/0000/0000000.h5"),
        (999, "lmdb", "shards/0000/0000999.lmdb"),
        (1234, "hdf5", "shards/0001/0001234.h5"),
        (4_999_999, "lmdb", "shards/4999/4999999.lmdb"),
    ],
)
def test_shard_name(number: int, container: str, name: str) -> None:
    assert layout.shard_name(number, container) == name


@given(st.sets(st.integers(0, 9_999_999), max_size=50))
def test_shard_names_are_distinct_and_sort_as_their_numbers(numbers: set[int]) -> None:
    names = [layout.shard_name(number, "hdf5") for number in sorted(numbers)]
    assert names == sorted(set(names))


# -- order

PARTS = st.text(alphabet="aB-.é0 ", min_size=1, max_size=3).filter(lambda part: part.strip(". ") != "")
KEYS = st.lists(st.lists(PARTS, min_size=2, max_size=4).map("/".join), min_size=1, max_size=25, unique=True)


def without_files_that_are_folders(keys: list[str]) -> list[str]:
    folders = {"/".join(key.split("/")[:depth]) for key in keys for depth in range(1, key.count("/") + 1)}
    return [key for key in keys if key not in folders]


@settings(max_examples=40)
@given(KEYS)
def test_order_key_is_the_order_of_a_sorted_walk(keys: list[str]) -> None:
    keys = without_files_that_are_folders(keys)
    root = Path(tempfile.mkdtemp())
    try:
        for key in keys:
            (root / key).parent.mkdir(parents=True, exist_ok=True)
            (root / key).touch()
        by_class = [key for name in sorted(os.listdir(root)) for key in walk(root, root / name)]
        as_one = walk(root, root)
    finally:
        shutil.rmtree(root)
    raw = [os.fsencode(key) for key in keys]
    assert [*map(os.fsdecode, sorted(raw, key=lambda key: layout.order_key(key, labelled=True)))] == by_class
    assert [*map(os.fsdecode, sorted(raw, key=lambda key: layout.order_key(key, labelled=False)))] == as_one


def walk(root: Path, folder: Path) -> list[str]:
    """torchvision's ``make_dataset``, for one class."""
    return [
        os.path.relpath(os.path.join(above, name), root)
        for above, _, names in sorted(os.walk(folder, followlinks=True))
        for name in sorted(names)
    ]


def test_order_key_puts_a_hyphen_before_the_slash() -> None:
    keys = [b"c/a/b", b"c/a-b/x", b"c/a/b/y", b"c/z", b"c-d/a"]
    assert sorted(keys, key=lambda key: layout.order_key(key, labelled=True)) == [
        b"c/z", b"c/a/b", b"c/a-b/x", b"c/a/b/y", b"c-d/a",
    ]  # fmt: skip


@given(st.binary(min_size=1, max_size=40), st.integers(0, 2**63))
def test_shuffle_key_is_blake3_of_seed_and_key(key: bytes, seed: int) -> None:
    assert layout.shuffle_key(key, seed) == blake3(str(seed).encode() + b"/" + key).digest()[:16]


# -- digests and JSON


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_digest_does_not_depend_on_how_the_bytes_are_cut(parts: list[bytes]) -> None:
    assert layout.digest(*parts) == layout.digest(b"".join(parts)) == blake3(b"".join(parts)).hexdigest()[:32]


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_canonical_json_is_one_ascii_line(value: object) -> None:
    data = layout.canonical_json(value)
    assert data.isascii()
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    assert json.loads(data) == value
