"""`scripts/make_images.py`: same arguments, same bytes; sizes as asked; nobody else's folder touched."""

import importlib.util
import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_images.py"


def load_script() -> ModuleType:
    """Import the script from its path: `scripts` is no package."""
    spec = importlib.util.spec_from_file_location("make_images", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def contents(folder: Path) -> dict[str, bytes]:
    """Read every file below a folder, hidden ones too, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mean_bytes(folder: Path) -> float:
    """Mean size of the pictures below a folder in bytes."""
    return float(np.mean([path.stat().st_size for path in folder.rglob("img_*")]))


def run(*words: object) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(script.main, [str(word) for word in words])


def assert_refused(result: Result, *parts: str) -> None:
    """One line on stderr that holds the parts, and status 2."""
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


def test_workers_do_not_change_a_byte(tmp_path: Path) -> None:
    # A command of its own: where processes are not forked, workers cannot import what a test loaded by path.
    words = ["--count", "70", "--classes", "3", "--size", "20-40", "--workers", "2"]
    command = [sys.executable, str(SCRIPT), str(tmp_path / "two"), *words]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    script.make_images(tmp_path / "one", count=70, classes=3, size="20-40")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_layout_and_marker(tmp_path: Path) -> None:
    assert script.make_images(tmp_path, count=5, classes=2, size="16x8") == 5
    assert sorted(contents(tmp_path)) == [
        script.MARKER_NAME,
        "class_000/img_0000000.jpg",
        "class_000/img_0000002.jpg",
        "class_000/img_0000004.jpg",
        "class_001/img_0000001.jpg",
        "class_001/img_0000003.jpg",
    ]


def test_another_seed_gives_other_pictures(tmp_path: Path) -> None:
    for seed in (0, 1):
        script.make_images(tmp_path / str(seed), count=8, classes=2, seed=seed, size="16x16")
    every = [data for name, data in contents(tmp_path).items() if not name.endswith(script.MARKER_NAME)]
    assert len(set(every)) == len(every) == 16


@pytest.mark.parametrize(("image_format", "suffix"), [("jpeg", "jpg"), ("png", "png"), ("webp", "webp")])
def test_formats_and_exact_size(tmp_path: Path, image_format: str, suffix: str) -> None:
    script.make_images(tmp_path, count=2, classes=1, size="50x30", image_format=image_format)
    for number in range(2):
        with Image.open(tmp_path / "class_000" / f"img_000000{number}.{suffix}") as image:
            assert (image.format, image.mode, image.size) == (image_format.upper(), "RGB", (50, 30))
            image.load()


def test_default_sizes_are_mixed(tmp_path: Path) -> None:
    script.make_images(tmp_path, count=12)
    sizes = {Image.open(io.BytesIO(data)).size for name, data in contents(tmp_path).items() if "img" in name}
    assert len(sizes) > 6
    assert all(160 <= max(size) <= 640 and min(size) >= 80 for size in sizes)
    assert {width > height for width, height in sizes} == {True, False}


def test_jpegs_take_as_many_bytes_a_pixel_as_photographs(tmp_path: Path) -> None:
    script.make_images(tmp_path, count=30, size="320x240")
    assert 0.25 < mean_bytes(tmp_path) / (320 * 240) < 0.4


def test_classes_differ_in_hue(tmp_path: Path) -> None:
    script.make_images(tmp_path, count=60, classes=3, size="32x32")
    for label in range(3):
        pixels = [np.asarray(Image.open(path)) for path in (tmp_path / f"class_00{label}").iterdir()]
        red_green_blue = np.mean(pixels, axis=(0, 1, 2))
        assert red_green_blue.argmax() == label  # of three hues the first is red, then green, then blue


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mean_bytes": 5 * 1024}, id="sizes-follow"),
        pytest.param({"mean_bytes": 4 * 1024, "size": "60x40", "image_format": "png"}, id="png"),
        pytest.param({"mean_bytes": 3 * 1024, "size": "96x96"}, id="detail-follows"),
        pytest.param({"mean_bytes": 1400, "size": "96x96"}, id="quality-falls"),
        pytest.param({"mean_bytes": 8 * 1024, "size": "96x96"}, id="quality-rises"),
    ],
)
def test_mean_bytes_are_near_the_target(tmp_path: Path, options: dict[str, Any]) -> None:
    script.make_images(tmp_path, count=150, **options)
    assert mean_bytes(tmp_path) == pytest.approx(options["mean_bytes"], rel=0.1)


def test_run_again_leaves_files_alone_and_draws_the_missing(tmp_path: Path) -> None:
    script.make_images(tmp_path, count=20, size="32x32", mean_bytes=1200)
    before = contents(tmp_path)
    kept, lost = tmp_path / "class_000/img_0000000.jpg", tmp_path / "class_003/img_0000013.jpg"
    kept.write_bytes(b"mine")
    lost.unlink()
    (lost.parent / f".{lost.name}.tmp").write_bytes(b"half")  # as an interrupted run leaves it
    assert script.make_images(tmp_path, count=20, size="32x32", mean_bytes=1200) == 1
    assert contents(tmp_path) == before | {"class_000/img_0000000.jpg": b"mine"}
    assert script.make_images(tmp_path, count=20, size="32x32", mean_bytes=1200) == 0


def test_progress_adds_up(tmp_path: Path) -> None:
    steps: list[int] = []
    script.make_images(tmp_path, count=40, size="8x8", on_written=steps.append)
    assert sum(steps) == 40
    assert len(steps) > 1


def test_command_says_what_it_did(tmp_path: Path) -> None:
    words = (tmp_path, "--count", 10, "--size", "16x16", "--bytes", "0.9K")
    result = run(*words)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{tmp_path}: 10 images, 10 of them drawn now\n"
    assert run(*words).stdout == f"{tmp_path}: 10 images, 0 of them drawn now\n"


def test_foreign_folder_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_bytes(b"years of work")
    assert_refused(run(tmp_path, "--count", 10), str(tmp_path), "not empty")
    assert contents(tmp_path) == {"thesis.txt": b"years of work"}


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_refused(run(tmp_path / "file"), "not a folder")


def test_other_arguments_are_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path, "--count", 10, "--size", "8x8")
    before = contents(tmp_path)
    assert_refused(run(tmp_path, "--count", 12, "--size", "8x8"), "count 10, not 12")
    assert_refused(run(tmp_path, "--count", 10, "--size", "8x8", "--seed", 4), "seed 0, not 4")
    assert contents(tmp_path) == before


def test_damaged_marker_is_refused(tmp_path: Path) -> None:
    (tmp_path / script.MARKER_NAME).write_text("{")
    assert_refused(run(tmp_path), script.MARKER_NAME, "damaged")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--count", "0"), "count must be 1 to 1,000,000, got 0"),
        (("--count", "1000001"), "count must be"),
        (("--count", "many"), "'many' is not a valid integer"),
        (("--count", "5"), "classes must be 1 to 5, got 10"),
        (("--classes", "-1"), "classes must be"),
        (("--seed", "-1"), "seed must be"),
        (("--quality", "101"), "quality must be"),
        (("--workers", "0"), "workers must be"),
        (("--size", "huge"), "size must be WxH or LOW-HIGH"),
        (("--size", "4x4"), "size must be 8 to 2,048, got 4"),
        (("--bytes", "5Q"), "bytes must be a number"),
        (("--bytes", "0"), "bytes must be"),
        (("--bytes", "50K", "--size", "8x8"), "bytes of 51,200 cannot be had: at most"),
        (("--bytes", "9", "--size", "8x8"), "bytes of 9 cannot be had: at least"),
        (("--bytes", "9"), "bytes of 9 cannot be had"),
        (("--format", "gif"), "'gif'"),
    ],
)
def test_wrong_usage_is_one_line_and_leaves_nothing(tmp_path: Path, words: tuple[str, ...], part: str) -> None:
    assert_refused(run(tmp_path / "out", *words), part)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("5000", 5000), ("5K", 5120), ("5kib", 5120), ("1.5M", 1_572_864), ("2 MB", 2_097_152)],
)
def test_parse_bytes(text: str, size_bytes: int) -> None:
    assert script.parse_bytes(text) == size_bytes


def test_interrupt_ends_with_status_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "write_pictures", interrupt)
    result = run(tmp_path, "--count", 10, "--size", "8x8")
    assert result.exit_code == 130
    assert "The same command draws the rest." in result.stderr
