"""`packer/report.py`: sums that add up, and a line for each thing that may surprise in training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from packer import PackOptions, PackReport, pack
from packer.report import Tallies

Tree = Callable[..., Path]
Draw = Callable[..., bytes]


def packed(source: Path, out: Path, **options: Any) -> PackReport:
    """Pack in this process; any number of rejects."""
    return pack(source, out, PackOptions(**{"workers": 1, "max_rejects": "100%", **options}))


@pytest.fixture
def mixed(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> Path:
    """Something of everything."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return make_tree(
        tmp_path / "s",
        {
            "a/1.jpg": draw_image(1), "a/2.png": draw_image(2, mode="RGBA", format="PNG"), "a/3.txt": b"x",
            "a/4.jpg": draw_image(4, exif=exif.tobytes()), "a/.hidden": b"", "a/5.gif": draw_image(5, format="GIF"),
            "b/cmyk.jpg": draw_image(6, mode="CMYK"), "b/empty.jpg": b"", "b/deep/7.png": b"\x89PNG\r\n\x1a\n",
            "b/16.png": draw_image(8, mode="I;16", format="PNG"), "c": None, "outside.jpg": draw_image(9), "x.csv": b"",
        },
    )  # fmt: skip


@pytest.mark.parametrize(("workers", "shard_records"), [(1, None), (3, None), (1, 2), (2, 2)])
def test_everything_is_counted_once(mixed: Path, tmp_path: Path, workers: int, shard_records: int | None) -> None:
    report = packed(mixed, tmp_path / "o", workers=workers, shard_records=shard_records)
    assert (report.found, report.packed, report.rejected) == (8, 6, 2)
    assert report.reasons == {"empty": 1, "unsupported": 1}
    assert report.ignored == {".txt": 1, ".csv": 1, "outside the class folders": 1}
    assert report.skipped == 1
    assert report.listed == report.found + sum(report.ignored.values()) + report.skipped
    assert report.listed == sum(path.is_file() for path in mixed.rglob("*"))
    assert report.formats == {"JPEG": 3, "PNG": 2, "GIF": 1}
    assert report.modes == {"RGB": 2, "RGBA": 1, "P": 1, "CMYK": 1, "I;16": 1}
    assert report.orientations == {"6": 1}
    assert report.flags == {"alpha": 1, "cmyk": 1, "16-bit": 1}
    assert report.classes == 3
    assert report.shards == (1 if shard_records is None else 4)
    assert report.bytes == sum(path.stat().st_size for path in (tmp_path / "o/shards").rglob("*.h5"))
    assert (report.resumed, report.already_done) == (0, False)
    assert report.seconds > 0


def test_surprises_have_a_line_each(mixed: Path, tmp_path: Path) -> None:
    warnings = packed(mixed, tmp_path / "o").warnings
    for words in (
        "2 of 8 images rejected", "first 'b/empty.jpg': empty (0 bytes). See rejects.jsonl",
        "1 image carry an EXIF orientation", "composites them over white", "more than 8 bits a channel", "are CMYK",
        "1 image beside the class folders ignored, as ImageFolder does", "1 class without images, first 'c'",
        "sample indices differ from ImageFolder's on this source: 2 rejected files, files it would not take (.gif 1), "
        "an empty class (it needs allow_empty=True)",
    ):  # fmt: skip
        assert sum(words.replace("carry", "carr") in line.replace("carries", "carry").replace("carry", "carr")
                   for line in warnings) == 1, words  # fmt: skip
    assert len(warnings) == len(set(warnings)) <= 9


def test_nothing_to_say_says_nothing(tmp_path: Path, image_tree: Tree) -> None:
    report = packed(image_tree(tmp_path / "s"), tmp_path / "o")
    assert report.warnings == []
    assert report.reasons == report.flags == report.orientations == report.ignored == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"a/x.jfif": "JPEG"}, "files it would not take (.jfif 1)"),
        ({"a/.x.jpg": "JPEG"}, "1 hidden files or folders it may take"),
        ({".cache/x.jpg": "JPEG"}, "1 hidden files or folders it may take"),
        ({"a/x.jpg": None}, "1 rejected files"),
    ],
)
def test_a_set_that_differs_from_imagefolder_says_why(
    tmp_path: Path, make_tree: Tree, draw_image: Draw, change: dict[str, str | None], reason: str
) -> None:
    files = {"a/1.jpg": draw_image(1)} | {name: draw_image(2) if kind else b"" for name, kind in change.items()}
    report = packed(make_tree(tmp_path / "s", files), tmp_path / "o")
    assert [line for line in report.warnings if line.startswith("sample indices differ")] == [
        f"sample indices differ from ImageFolder's on this source: {reason}"
    ]


def test_hidden_files_that_imagefolder_would_not_take_make_no_difference(
    tmp_path: Path, make_tree: Tree, draw_image: Draw
) -> None:
    files = {"a/1.jpg": draw_image(1), "a/.DS_Store": b"", "Thumbs.db": b"", "a/desktop.ini": b""}
    report = packed(make_tree(tmp_path / "s", files), tmp_path / "o")
    assert (report.skipped, report.warnings) == (3, [])


def test_the_shuffle_is_a_difference(tmp_path: Path, image_tree: Tree) -> None:
    report = packed(image_tree(tmp_path / "s"), tmp_path / "o", shuffle=0)
    assert report.warnings == ["sample indices differ from ImageFolder's on this source: the stored shuffle"]


def test_loops_are_named(tmp_path: Path, image_tree: Tree) -> None:
    source = image_tree(tmp_path / "s")
    (source / "c0" / "again").symlink_to(source)
    report = packed(source, tmp_path / "o")
    assert "links that lead back to their own folder were not followed, first 'c0/again'" in report.warnings


def test_without_labels(tmp_path: Path, make_tree: Tree, draw_image: Draw) -> None:
    report = packed(make_tree(tmp_path / "s", {"1.jpg": draw_image(1), "2.gif": draw_image(2)}), tmp_path / "o")
    assert report.classes is None
    assert report.lines()[0].startswith(f"{tmp_path / 'o'}: 2 images, no labels, 1 hdf5 shard, ")
    assert report.warnings == []


def test_check_none_knows_no_formats(tmp_path: Path, image_tree: Tree) -> None:
    report = packed(image_tree(tmp_path / "s"), tmp_path / "o", check="none")
    assert report.formats == {"unknown": 6}
    assert not any(line.startswith("formats") for line in report.lines())


@pytest.mark.parametrize("shard_records", [None, 2])
def test_a_finished_set_reports_the_same_counts_again(mixed: Path, tmp_path: Path, shard_records: int | None) -> None:
    first = packed(mixed, tmp_path / "o", shard_records=shard_records)
    again = packed(mixed, tmp_path / "o", shard_records=shard_records)
    assert again.already_done
    for name in ("out", "container", "listed", "found", "packed", "rejected", "reasons", "ignored", "skipped", "shards",
                 "bytes", "classes"):  # fmt: skip
        assert getattr(again, name) == getattr(first, name), name
    assert again.lines()[0].endswith(": already packed: 6 images, 3 classes")


def test_a_resumed_run_reports_the_whole_set(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packer import run

    whole = packed(mixed, tmp_path / "whole", shard_records=2)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run._Run, "_publish_manifest", stop)
        with pytest.raises(KeyboardInterrupt):
            packed(mixed, tmp_path / "o", shard_records=2)
    resumed = packed(mixed, tmp_path / "o", shard_records=2)
    assert resumed.resumed == 4
    assert "4 shards were there from an earlier run" in resumed.lines()[1]
    same = {"out": "", "seconds": 0.0, "resumed": 0}
    assert {**resumed.to_dict(), **same} == {**whole.to_dict(), **same}


def test_as_json(mixed: Path, tmp_path: Path) -> None:
    report = packed(mixed, tmp_path / "o")
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_tallies_add_up() -> None:
    tallies = Tallies()
    receipt = {
        "counts": {"classes": {"0": 2}, "formats": {"JPEG": 2}, "modes": {}, "orientations": {}, "flags": {"icc": 1}},
        "payload_bytes": 10,
        "rejects": [{"key": "a", "reason": "empty", "detail": "0 bytes"}],
    }
    for _ in range(3):
        tallies.add(receipt)
    assert (tallies.classes, tallies.flags, tallies.reasons) == ({"0": 6}, {"icc": 3}, {"empty": 3})
    assert tallies.payload_bytes == 30
    assert tallies.first_reject == "'a': empty (0 bytes)"
