"""readers/manifest.py: what is accepted, and that everything else is one ManifestError on one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readers import manifest as module
from readers.errors import ManifestError, ReaderError, ShardCorruptError, ShardNotFoundError, UnfinishedSetError
from readers.layout import FIELDS, canonical_json, digest
from readers.manifest import MAX_MANIFEST_BYTES, Manifest

LONGEST_MESSAGE = 400


def make(records: tuple[int, ...] = (3, 0, 4), **changes: Any) -> Manifest:
    said = {
        "container": "hdf5",
        "classes": ("a", "b"),
        "class_counts": (sum(records), 0),
        "records": sum(records),
        "rejected": 1,
        "options": {"shuffle": None, "check": "decode"},
        "source": {"found": sum(records) + 1, "listing_blake3": "0" * 32},
        "created_by": "shardpack 0",
        "shard_records": records,
        "shard_bytes": tuple(4096 + n for n in records),
        "shard_ids": tuple(f"{n:032x}" for n in records),
        "shard_blake3s": tuple(f"{n:064x}" for n in records),
    }
    return Manifest(**(said | changes))


def members() -> dict[str, Any]:
    return dict(json.loads(make().to_bytes()))


def to_bytes(value: dict[str, Any]) -> bytes:
    """Back to JSON, with a set_id that fits where the columns still have one."""
    shards = value.get("shards")
    if isinstance(shards, dict) and isinstance(value.get("set_id"), str) and len(value["set_id"]) == 32:
        columns = {name: shards.get(name) for name in ("records", "bytes", "shard_id", "blake3")}
        value = value | {"set_id": digest(canonical_json(columns))}
    return json.dumps(value).encode()


def refused(data: bytes) -> str:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_bytes(data, "SET/manifest.json")
    text = str(caught.value)
    assert text.startswith("SET/manifest.json: ")
    assert text.splitlines() == [text]
    assert text.isprintable()
    assert len(text) <= LONGEST_MESSAGE
    return text


# -- good ones


def test_round_trip() -> None:
    manifest = make()
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_bytes_are_ascii_canonical_and_one_member_a_line() -> None:
    data = make(classes=("é", "\udcff"), class_counts=(7, 0)).to_bytes()
    assert data.isascii()
    assert json.dumps(json.loads(data), separators=(",", ":")) == data.decode().replace("\n", "")
    assert [line.split(b":")[0] for line in data.splitlines()[1:-1]] == [
        json.dumps(name).encode() for name in json.loads(data)
    ]


def test_member_names_are_the_documented_ones() -> None:
    assert list(members()) == [
        "format", "version", "requires", "container", "fields", "classes", "class_counts", "records", "rejected",
        "options", "source", "created_by", "set_id", "shards",
    ]  # fmt: skip
    assert list(members()["shards"]) == ["records", "bytes", "shard_id", "blake3"]


COUNTS = st.lists(st.integers(0, 10**12), max_size=6).map(tuple)
NAMES = st.text(st.characters() | st.integers(0xDC80, 0xDCFF).map(chr), max_size=8)


@settings(max_examples=50)
@given(COUNTS, st.lists(NAMES, min_size=1, max_size=4, unique=True), st.dictionaries(NAMES, NAMES | st.none()))
def test_any_manifest_round_trips(counts: tuple[int, ...], classes: list[str], options: dict[str, Any]) -> None:
    manifest = make(
        counts,
        classes=tuple(classes),
        class_counts=(sum(counts),) + (0,) * (len(classes) - 1),
        options=options,
    )
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest
    assert again.set_id == manifest.set_id


def test_set_without_labels_has_no_classes() -> None:
    manifest = make(classes=None, class_counts=None)
    assert Manifest.from_bytes(manifest.to_bytes()).classes is None


def test_unknown_members_and_fields_are_ignored() -> None:
    value = members() | {"later": {"x": [1]}}
    value["fields"] |= {"caption": "bytes"}
    value["shards"] |= {"extra": None}
    assert Manifest.from_bytes(to_bytes(value)) == make()


@given(COUNTS.filter(sum))
def test_locate_finds_every_shards_first_and_last_record(counts: tuple[int, ...]) -> None:
    manifest = make(counts)
    start = 0
    for number, count in enumerate(counts):
        assert manifest.first_index(number) == start
        if count:
            assert manifest.locate(start) == (number, 0)
            assert manifest.locate(start + count - 1) == (number, count - 1)
        start += count


def test_locate_agrees_with_a_list() -> None:
    counts = (0, 3, 0, 0, 1, 4, 0)
    expected = [(number, position) for number, count in enumerate(counts) for position in range(count)]
    assert [make(counts).locate(index) for index in range(8)] == expected


# -- bad ones, member by member

NUMBERS = (None, "7", 7.0, True, [7], {}, -1, 2**63, 10**400, "\ud800")
BAD: dict[str, tuple[Any, ...]] = {
    "format": (None, 1, True, [], {}, "", "webdataset", "shardpack\n", "x" * 10**6),
    "version": (*NUMBERS, 0, 2, 99),
    "requires": (None, "x", 1, {}, [1], [None], [["x"]], ["zstd"], ["\n\x1b[2J"], ["x" * 10**6]),
    "container": (None, 1, [], {}, "", "HDF5", "tar", "tar\nx", "../hdf5", "x" * 10**6),
    "fields": (None, 1, "image", [], {}, {"image": 1}, {**FIELDS, "label": "i32"}, {**FIELDS, "image": None}),
    "classes": (1, "a", {}, [1, 2], [None, "b"], [["a"], "b"], ["a"], ["a", "b", "c"]),
    "class_counts": (None, 7, "x", {}, [], [7], [7, 0, 0], [7.0, 0], [True, 6], [-1, 8], [2**63, 0], [None, 7], [7, 1]),
    "records": (*NUMBERS, 6, 8),
    "rejected": NUMBERS,
    "options": (None, 1, "x", []),
    "source": (None, 1, "x", []),
    "created_by": (None, 1, [], {}),
    "set_id": (None, 1, [], {}, "", "0" * 32 + "\n", "0" * 31, "x" * 10**6),
    "shards": (None, 1, "x", [], {}),
}
COLUMN = (None, 7, "x", {}, [], [3, 0], [3, 0, 4, 0], [3, 0, "4"], [3, 0, 4.0], [True, 0, 6], [-1, 4, 4], [2**63, 0, 0])
HEX = (None, 7, "x", {}, [], ["0"], [1, 2, 3], [None] * 3, ["x" * 32] * 3, ["A" * 64] * 3, ["A" * 32] * 3, ["0\n"] * 3)
BAD_COLUMNS: dict[str, tuple[Any, ...]] = {
    "records": (*COLUMN, [2**63 - 1] * 3),
    "bytes": COLUMN,
    "shard_id": HEX,
    "blake3": HEX,
}


def ids(value: Any) -> str:
    return repr(value)[:30]


@pytest.mark.parametrize("name", list(members()))
def test_missing_member_is_refused(name: str) -> None:
    value = members()
    del value[name]
    assert name in refused(json.dumps(value).encode())


@pytest.mark.parametrize("name", list(members()["shards"]))
def test_missing_column_is_refused(name: str) -> None:
    value = members()
    del value["shards"][name]
    assert f"shards.{name}" in refused(to_bytes(value))


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, bads in BAD.items() for bad in bads], ids=ids)
def test_bad_member_is_refused(name: str, bad: Any) -> None:
    refused(to_bytes(members() | {name: bad}))


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, bads in BAD_COLUMNS.items() for bad in bads], ids=ids)
def test_bad_column_is_refused(name: str, bad: Any) -> None:
    value = members()
    value["shards"][name] = bad
    refused(to_bytes(value))


def test_future_version_says_what_to_do() -> None:
    text = refused(to_bytes(members() | {"version": 2}))
    assert "format version 2; this reader knows 1" in text
    assert "Upgrade" in text


def test_unknown_requirement_is_named() -> None:
    text = refused(to_bytes(members() | {"requires": ["zstd-values"]}))
    assert "'zstd-values'" in text
    assert "Upgrade" in text


def test_requirement_of_a_later_version_is_answered_with_the_version() -> None:
    assert "version 2" in refused(to_bytes(members() | {"version": 2, "requires": ["zstd"], "fields": None}))


def test_two_classes_of_one_name_are_refused() -> None:
    # `class_to_idx` would silently lose one of them.
    refused(to_bytes(members() | {"classes": ["a", "a"]}))


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data.replace(b'"records":7', b'"records":7,"records":7'),
        lambda data: data.replace(b'"shards":{', b'"shards":{"records":[1],'),
        lambda data: data.replace(b'"options":{', b'"options":{"check":1,'),
    ],
)
def test_duplicate_member_is_refused(edit: Callable[[bytes], bytes]) -> None:
    data = make().to_bytes()
    assert edit(data) != data
    refused(edit(data))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("place", ['"records":7', '"rejected":1', '"records":[3,0,4]', '"found":8'])
def test_number_that_is_none_is_refused(constant: str, place: str) -> None:
    name, _, old = place.partition(":")
    new = f"[3,0,{constant}]" if old.startswith("[") else constant
    data = make().to_bytes().decode()
    assert place in data
    refused(data.replace(place, f"{name}:{new}").encode())


def test_number_with_very_many_digits_is_refused() -> None:
    # Python itself refuses to parse more than 4,300 digits.
    for digits in (19, 20, 4299, 4301, 100_000):
        refused(make().to_bytes().replace(b'"records":7', b'"records":' + b"9" * digits))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_hostile_nesting_is_refused(opening: bytes) -> None:
    refused(opening * 1_000_000)
    refused(make().to_bytes().replace(b'"options":', b'"later":' + opening * 1_000_000 + b',"options":'))


@pytest.mark.parametrize("name", ["records", "classes", "requires", "shards", "options"])
def test_nesting_just_short_of_the_limit_is_refused_too(name: str) -> None:
    # Deep enough to parse and too deep to print: an error message must not be the thing that fails.
    value = members()
    value.pop(name)
    rest = json.dumps(value).encode()
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 50):
        data = f'{{"{name}":'.encode() + b"[" * depth + b"]" * depth + b"," + rest[1:]
        with pytest.raises(ManifestError):
            Manifest.from_bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b"7",
        b'"x"',
        b"\xff\xfe",
        b"\x00" * 40,
        b"\xef\xbb\xbf{}",
        b"{}x",
        b"\x80",
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    refused(data)


def test_cut_manifest_is_refused_at_every_length() -> None:
    data = make().to_bytes()
    for length in range(len(data.rstrip())):
        refused(data[:length])


def test_sums_that_do_not_add_up_are_refused() -> None:
    data = make().to_bytes()
    assert "set_id" in refused(data.replace(b'"bytes":[4099,', b'"bytes":[4098,'))
    assert "set_id" in refused(data.replace(b'"records":[3,0,4]', b'"records":[4,0,3]'))
    assert "records" in refused(data.replace(b'"records":[3,0,4]', b'"records":[3,0,5]'))


# -- fuzz

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(2**63 - 1),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
PLACES = [(name,) for name in members()] + [("shards", name) for name in members()["shards"]] + [("later",)]


@settings(max_examples=200)
@given(st.sampled_from(PLACES), JSON)
def test_any_value_in_any_place_is_read_or_refused(place: tuple[str, ...], value: object) -> None:
    changed = members()
    target = changed
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = value
    read_or_refused(to_bytes(changed))


@settings(max_examples=200)
@given(st.integers(0, len(make().to_bytes()) - 1), st.binary(max_size=3), st.integers(0, 3))
def test_any_damage_is_read_or_refused(at: int, new: bytes, cut: int) -> None:
    data = make().to_bytes()
    read_or_refused(data[:at] + new + data[at + cut :])


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    refused(data)


def read_or_refused(data: bytes) -> None:
    try:
        manifest = Manifest.from_bytes(data, "SET/manifest.json")
    except ManifestError:
        refused(data)
    else:
        assert sum(manifest.shard_records) == manifest.records
        assert Manifest.from_bytes(manifest.to_bytes()) == manifest


# -- files


def test_manifest_above_100_mb_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    with open(tmp_path / "manifest.json", "wb") as file:
        file.write(make().to_bytes())
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(ManifestError, match="larger than 100,000,000 bytes"):
        Manifest.load(tmp_path)


def test_manifest_of_just_the_cap_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make().to_bytes()
    (tmp_path / "manifest.json").write_bytes(data)
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", len(data))
    assert Manifest.load(tmp_path) == make()
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", len(data) - 1)
    with pytest.raises(ManifestError):
        Manifest.load(tmp_path)


def test_folder_without_manifest_is_unfinished(tmp_path: Path) -> None:
    with pytest.raises(UnfinishedSetError, match="not a finished packed set"):
        Manifest.load(tmp_path)
    (tmp_path / ".pack").mkdir()
    with pytest.raises(UnfinishedSetError, match="packing has not finished"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_no_folder_is_unfinished_too(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"no such folder|a file, not a folder") as caught:
        Manifest.load(tmp_path / name)
    assert isinstance(caught.value, ReaderError)


def test_check_files_names_the_first_shard_that_is_not_as_it_was(tmp_path: Path) -> None:
    manifest = make((1, 2, 3))
    for number, size in enumerate(manifest.shard_bytes):
        path = Path(manifest.shard_path(str(tmp_path), number))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, size)
    manifest.check_files(str(tmp_path))
    os.truncate(manifest.shard_path(str(tmp_path), 1), 4097)
    with pytest.raises(ShardCorruptError, match=r"0000001\.h5: 4,097 bytes, but the manifest says 4,098"):
        manifest.check_files(str(tmp_path))
    os.remove(manifest.shard_path(str(tmp_path), 0))
    with pytest.raises(ShardNotFoundError, match=r"0000000\.h5: shard 0 of 3 is missing"):
        manifest.check_files(str(tmp_path))


def test_real_manifest_round_trips_to_the_same_bytes(small: Any) -> None:
    data = (small.root / "manifest.json").read_bytes()
    assert Manifest.load(small.root).to_bytes() == data
    assert str(small.source).encode() not in data
