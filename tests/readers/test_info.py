"""`shards info` counts what is really in a set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packer import PackOptions, pack
from readers.info import duplicates, info, info_lines

Draw = Callable[..., bytes]
MakeTree = Callable[[Path, dict[str, Any]], Path]


@pytest.fixture
def packed(tmp_path: Path, container: str, draw_image: Draw, make_tree: MakeTree) -> Path:
    make_tree(
        tmp_path / "source",
        {
            "a/1.jpg": draw_image(1),
            "a/2.png": draw_image(2, format="PNG", mode="RGBA"),
            "b/3.jpg": draw_image(1),
            "b/4.jpg": draw_image(4, mode="CMYK"),
            "b/broken.jpg": b"no image",
            "empty": None,
        },
    )
    options = PackOptions(format=container, shard_records=2, max_rejects="100%", workers=1)
    pack(tmp_path / "source", tmp_path / "set", options)
    return tmp_path / "set"


def test_counts(packed: Path, tmp_path: Path) -> None:
    facts = info(packed)
    files = [p for p in (tmp_path / "source").rglob("*.*") if p.name != "broken.jpg"]
    assert facts["records"] == 4
    assert facts["rejected"] == 1
    assert facts["classes"] == {"a": 2, "b": 2, "empty": 0}
    assert facts["formats"] == {"JPEG": 3, "PNG": 1}
    assert facts["modes"] == {"RGB": 2, "RGBA": 1, "CMYK": 1}
    assert facts["flags"] == {"alpha": 1, "cmyk": 1}
    assert facts["payload_bytes"] == sum(p.stat().st_size + len(f"a/{p.name}") for p in files)
    assert facts["bytes"] == sum(p.stat().st_size for p in (packed / "shards").rglob("*.*"))
    assert facts["image_bytes"]["least"] == min(p.stat().st_size for p in files)
    assert facts["image_bytes"]["most"] == max(p.stat().st_size for p in files)
    assert facts["overhead"] == round(facts["bytes"] / facts["payload_bytes"], 4)
    assert "4 images" in info_lines(facts)[0]


def test_lmdb_reports_its_overhead(tmp_path: Path, image_tree: Callable[..., Path]) -> None:
    image_tree(tmp_path / "source", classes=1, per_class=50, size=(96, 80))
    for container in ("hdf5", "lmdb"):
        pack(tmp_path / "source", tmp_path / container, PackOptions(format=container, workers=1))
    assert info(tmp_path / "lmdb")["overhead"] > info(tmp_path / "hdf5")["overhead"]


def test_case_83_duplicates_are_kept_and_reported(packed: Path) -> None:
    assert info(packed)["records"] == 4
    assert duplicates(packed) == [["a/1.jpg", "b/3.jpg"]]


def test_the_command_prints_text_or_json(packed: Path) -> None:
    words = [sys.executable, "-m", "readers", "info", os.fspath(packed)]
    text = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "overhead" not in text.stderr
    assert "of the payload" in text.stdout
    as_json = subprocess.run([*words, "--json", "--duplicates"], capture_output=True, text=True, check=True)
    facts = json.loads(as_json.stdout)
    assert facts["records"] == 4
    assert facts["duplicates"] == [["a/1.jpg", "b/3.jpg"]]
