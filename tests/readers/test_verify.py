"""`shards verify` finds whatever is not as it was packed, and says where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from packer import PackOptions, pack
from readers import UnfinishedSetError
from readers.handles import open_shard
from readers.layout import shard_name
from readers.manifest import Manifest
from readers.verify import verify


@pytest.fixture
def packed(tmp_path: Path, container: str, image_tree: Callable[..., Path]) -> Path:
    source = image_tree(tmp_path / "source", classes=2, per_class=6)
    pack(source, tmp_path / "set", PackOptions(format=container, shard_records=4, workers=1))
    return tmp_path / "set"


def shard_file(root: Path, number: int) -> Path:
    return root / shard_name(number, Manifest.load(root).container)


def value_place(root: Path, number: int, position: int, field: str) -> int:
    """Where in the file a value begins."""
    shard = open_shard(str(root), Manifest.load(root), number)
    return shard.values_offset + int(shard.rows()[f"{field}_offset"][position])


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def run_shards(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "readers", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_good_set_is_good(packed: Path) -> None:
    seen: list[int] = []
    report = verify(packed, seen.append)
    assert report.ok
    assert (report.shards, report.records) == (3, 12)
    assert report.bytes == sum(seen) == sum(os.path.getsize(shard_file(packed, n)) for n in range(3))


@pytest.mark.parametrize("field", ["image", "key"])
def test_a_flipped_value_names_shard_position_and_key(packed: Path, field: str) -> None:
    manifest = Manifest.load(packed)
    key = open_shard(str(packed), manifest, 1).key(2)
    flip(shard_file(packed, 1), value_place(packed, 1, 2, field))
    (damage,) = verify(packed).damages
    assert (damage.shard, damage.position) == (1, 2)
    assert damage.key == (key if field == "image" else None)
    assert field in damage.what
    assert str(shard_file(packed, 1)) in str(damage)


def test_a_flipped_index_is_damage_of_the_shard(packed: Path) -> None:
    shard = open_shard(str(packed), Manifest.load(packed), 0)
    row = bytes(shard._rows[shard._blocks[0] : shard._blocks[0] + 56])
    place = shard_file(packed, 0).read_bytes().index(row)
    del shard
    flip(shard_file(packed, 0), place + 32)  # the label
    (damage,) = verify(packed).damages
    assert damage.shard == 0
    assert "index" in damage.what


def test_every_flipped_byte_of_a_shard_is_found(packed: Path) -> None:
    path = shard_file(packed, 2)
    good = path.read_bytes()
    for offset in range(0, len(good), 97):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        assert not verify(packed).ok, offset
    path.write_bytes(good)
    assert verify(packed).ok


def test_missing_and_short_shards_are_found_and_the_others_still_read(packed: Path) -> None:
    shard_file(packed, 0).unlink()
    os.truncate(shard_file(packed, 1), 5000)
    report = verify(packed)
    assert [damage.shard for damage in report.damages] == [0, 1]
    assert report.records == 4
    assert "missing" in report.damages[0].what


def test_the_command_says_where_and_leaves_with_1(packed: Path) -> None:
    flip(shard_file(packed, 1), value_place(packed, 1, 0, "image"))
    done = run_shards("verify", str(packed))
    assert done.returncode == 1
    assert "record 0" in done.stdout
    assert "Traceback" not in done.stderr
    as_json = json.loads(run_shards("verify", str(packed), "--json").stdout)
    assert as_json["ok"] is False
    assert as_json["damages"][0]["shard"] == 1


def test_a_good_set_leaves_with_0(packed: Path) -> None:
    done = run_shards("verify", str(packed))
    assert (done.returncode, done.stderr) == (0, "")
    assert "every byte is as packed" in done.stdout


def test_no_set_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnfinishedSetError):
        verify(tmp_path)
    done = run_shards("verify", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_a_pipe_in_place_of_a_file_is_damage_not_a_hang(packed: Path) -> None:
    shard_file(packed, 1).unlink()
    os.mkfifo(shard_file(packed, 1))
    assert [damage.what for damage in verify(packed).damages] == ["not a file"]
    (packed / "manifest.json").unlink()
    os.mkfifo(packed / "manifest.json")
    done = run_shards("verify", str(packed))
    assert done.returncode == 1
    assert "not a file" in done.stderr
