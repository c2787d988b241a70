"""What comes out is what went in, byte for byte: photographs, hard files, odd names, any bytes."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from packer import PackOptions, pack
from readers import ShardDataset
from readers.layout import key_from_json

Plain = Callable[[Path], list[Any]]


def hashes_below(root: Path) -> dict[bytes, str]:
    """Key -> SHA-256 of every file below a folder."""
    return {
        os.fsencode(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


def rejected_keys(out: Path) -> set[bytes]:
    """Keys in ``rejects.jsonl``."""
    path = out / "rejects.jsonl"
    return {key_from_json(json.loads(line)) for line in path.read_bytes().splitlines()} if path.exists() else set()


def through_readers(out: Path) -> list[tuple[bytes, bytes, int]]:
    """(key, image, label) of every record, as `ShardDataset` gives them."""
    dataset = ShardDataset(out, decode="bytes")
    labelled = dataset.manifest.classes is not None
    return [
        (os.fsencode(dataset.key(i)), sample.image if labelled else sample, sample.target if labelled else -1)
        for i, sample in enumerate(dataset)
    ]


def assert_same_records(out: Path, plain_records: Plain) -> list[Any]:
    """Plain libraries and our reader agree on a set; returns its records."""
    records = plain_records(out)
    assert through_readers(out) == [tuple(record) for record in records]
    return records


def test_case_68_photographs_come_back_byte_for_byte(
    tmp_path: Path, shared_data: Path, plain_records: Plain, container: str
) -> None:
    from torchvision.datasets import ImageFolder

    photos = shared_data / "photos"
    report = pack(photos, tmp_path / "o", PackOptions(workers=1, format=container, shard_size="4MiB"))
    records = assert_same_records(tmp_path / "o", plain_records)
    assert {r.key: hashlib.sha256(r.image).hexdigest() for r in records} == hashes_below(photos)
    want = [(os.path.relpath(path, photos), label) for path, label in ImageFolder(str(photos)).samples]
    assert [(os.fsdecode(r.key), r.label) for r in records] == want
    assert (report.packed, report.rejected, report.shards) == (len(want), 0, 4)


def test_hard_files_come_back_or_are_named(
    tmp_path: Path, shared_data: Path, plain_records: Plain, container: str
) -> None:
    options = PackOptions(workers=1, format=container, all_files=True, max_rejects="100%", shard_size="1MiB")
    report = pack(shared_data / "hard", tmp_path / "o", options)
    with open(shared_data / "hard.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    good = {row["file"].encode(): row["sha256"] for row in rows if row["pillow_13_0"] == "ok"}
    bad = {row["file"].encode() for row in rows if row["pillow_13_0"] != "ok"}
    records = assert_same_records(tmp_path / "o", plain_records)
    assert {r.key: hashlib.sha256(r.image).hexdigest() for r in records} == good
    assert rejected_keys(tmp_path / "o") == bad
    assert (report.found, report.packed, report.rejected) == (len(rows), len(good), len(bad))


def odd_names(shared_data: Path) -> list[bytes]:
    r"""The names of ``odd-names.txt``; its notes in brackets explain ``\t``, ``\n`` and raw bytes."""
    names = []
    for line in (shared_data / "odd-names.txt").read_bytes().split(b"\n"):
        if not line:
            continue
        name, note = re.fullmatch(rb"(.*?)(?: \(([^()]*)\))?", line, re.DOTALL).groups()  # type: ignore[union-attr]
        if note in (b"a real tab", b"a real newline"):
            name = name.replace(rb"\t", b"\t").replace(rb"\n", b"\n")
        elif note == b"those two raw bytes":
            name = name.replace(rb"\xff", b"\xff").replace(rb"\xfe", b"\xfe")
        names.append(name)
    return names


def test_the_list_of_odd_names_is_read_as_meant(shared_data: Path) -> None:
    names = odd_names(shared_data)
    assert {b"tab\tinside.jpg", b"newline\ninside.jpg", b"invalid-utf8-\xff\xfe.jpg", b"a b/c d/e.jpg"} <= set(names)
    assert {b"back\\slash.jpg", b"  leading spaces.jpg", b"Thumbs.db"} <= set(names)
    assert len(names) == len(set(names)) == 35


HIDDEN = {b".hidden.jpg", b"._resource_fork.jpg", b"Thumbs.db", b".DS_Store", b"desktop.ini"}


@pytest.mark.parametrize("all_files", [False, True])
def test_odd_names(
    tmp_path: Path, shared_data: Path, draw_image: Callable[..., bytes], plain_records: Plain,
    container: str, all_files: bool,
) -> None:  # fmt: skip
    names = odd_names(shared_data)
    files = {b"class/" + name: draw_image(number) for number, name in enumerate(names)}
    for key, data in files.items():
        path = tmp_path / "s" / os.fsdecode(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    report = pack(tmp_path / "s", tmp_path / "o", PackOptions(workers=1, format=container, all_files=all_files))
    left_out = HIDDEN | (set() if all_files else {b"no_extension", b"endswithdot."})
    records = assert_same_records(tmp_path / "o", plain_records)
    assert {r.key: r.image for r in records} == {
        key: data for key, data in files.items() if key.removeprefix(b"class/") not in left_out
    }
    assert report.skipped == len(HIDDEN)
    assert report.listed == len(files)
    dataset = ShardDataset(tmp_path / "o", decode="bytes")
    assert [dataset.find(record.key) for record in records] == list(range(len(records)))


#: Starts of files that the packer takes for images when it looks at the first bytes only.
MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"RIFF....WEBP", b"P6")
#: Lengths at which LMDB changes how it stores a value, and some on both sides of a page.
LENGTHS = (0, 1, 1999, 2000, 2018, 2019, 2020, 2021, 2022, 2036, 2037, 2038, 2039, 2040, 4079, 4080, 4081, 4096, 9000)


def _is_name(part: bytes) -> bool:
    return (
        not part.startswith(b".")
        and not {0, 47} & set(part)
        and part.lower() not in (b"thumbs.db", b"desktop.ini", b"icon\r")
    )


NAME = st.binary(min_size=1, max_size=30).filter(_is_name)
CONTENT = st.builds(
    lambda magic, start, length: magic + start + bytes(i % 251 for i in range(length)),
    st.sampled_from(MAGICS), st.binary(max_size=40), st.sampled_from(LENGTHS),
)  # fmt: skip


@st.composite
def sources(draw: st.DrawFn) -> dict[bytes, bytes]:
    """Key -> content of a source with class folders; no key is also a folder."""
    path = st.builds(lambda folders, name: b"/".join([*folders, name]), st.lists(NAME, min_size=1, max_size=3), NAME)
    files = draw(st.dictionaries(path, CONTENT, min_size=1, max_size=12))
    folders = {b"/".join(key.split(b"/")[:n]) for key in files for n in range(1, key.count(b"/") + 1)}
    return {key: data for key, data in files.items() if key not in folders} or {b"\xff/\xfe": b"BM"}


@pytest.mark.parametrize("container", ["hdf5", "lmdb"])
@given(
    files=sources(),
    shard_records=st.sampled_from([None, 1, 2, 5]),
    shuffle=st.sampled_from([None, 0, 7]),
    labels=st.sampled_from(["folders", "none"]),
)
@hypothesis_settings(max_examples=25)
def test_any_bytes_under_any_names(
    plain_records: Plain, container: str, files: dict[bytes, bytes], shard_records: int | None,
    shuffle: int | None, labels: str,
) -> None:  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "s", Path(folder) / "o"
        for key, data in files.items():
            path = source / os.fsdecode(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        options = PackOptions(
            workers=1, format=container, check="none", all_files=True, labels=labels,
            shard_records=shard_records, shuffle=shuffle,
        )  # fmt: skip
        report = pack(source, out, options)
        records = assert_same_records(out, plain_records)
        assert {r.key: r.image for r in records} == files
        assert len(records) == report.packed == len(files)
        dataset = ShardDataset(out, decode="bytes")
        if labels == "folders":
            classes = sorted({os.fsdecode(key.split(b"/")[0]) for key in files})
            assert dataset.classes == classes
            assert [r.label for r in records] == [classes.index(os.fsdecode(r.key.split(b"/")[0])) for r in records]
        else:
            assert {r.label for r in records} == {-1}
        assert [dataset.find(r.key) for r in records] == list(range(len(records)))
        # The same command again finds the set as it is.
        assert pack(source, out, options).already_done
