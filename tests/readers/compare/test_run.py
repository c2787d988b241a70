"""Before and after: both arms deliver the same, what differs is refused, and the numbers mean what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.utils.data import get_worker_info

from readers.cli import cli
from readers.compare.arms import SquareTensor, draw, make_arms, open_sets
from readers.compare.cli import compare_command
from readers.compare.run import CompareError, CompareOptions, CompareReport, CompareUsageError, compare


def quick(**changes: Any) -> CompareOptions:
    """Options for a run that only has to work."""
    return CompareOptions(
        **({"repeats": 1, "num_workers": 0, "batch_size": 4, "image_size": 8, "device": "cpu"} | changes)
    )


def shards_compare(*words: object) -> Result:
    """``shards compare`` in this process, as short as it can be."""
    short = ("--repeats", "1", "--num-workers", "0", "--batch-size", "4", "--image-size", "8", "--device", "cpu")
    return CliRunner().invoke(cli, ["compare", *short, "--quiet", *map(str, words)])


def assert_one_line(result: Result, status: int, *parts: str) -> None:
    assert result.exit_code == status, result.output
    assert not result.stdout
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("cli compare: ")
    for part in parts:
        assert part in result.stderr


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory, image_tree: Callable[..., Path], pack_tree: Any) -> Path:
    """``source``, and ``hdf5`` and ``lmdb`` packed from it in shards of ten; do not change the files."""
    folder = tmp_path_factory.mktemp("compare")
    source = image_tree(folder / "source", classes=3, per_class=8)
    for container in ("hdf5", "lmdb"):
        pack_tree(source, folder / container, container, shard_records=10)
    return folder


def checksums(report: CompareReport) -> set[str]:
    return {arm["checksum"] for arm in report.arms}


# -- both arms deliver the same


@pytest.mark.parametrize("workers", [0, 2])  # 0: options that need workers are dropped (case 39)
def test_files_and_both_containers_deliver_the_same(sets: Path, workers: int) -> None:
    report = compare(
        sets / "source", [sets / "hdf5", sets / "lmdb"], quick(num_workers=workers, repeats=2, exif_transpose=True)
    )
    assert [arm["kind"] for arm in report.arms] == ["files", "hdf5", "lmdb"]
    assert len(checksums(report)) == 1
    (table,) = report.tables
    lead = max(1, workers)
    assert [[run.images for run in arm.runs] for arm in table.arms] == [[24 - 4 * lead] * 2] * 3
    assert report.images == {"in_set": 24, "measured": 24, "checked": 24, "bytes": report.images["bytes"]}
    assert "images have the same pixels and labels" in report.lines()[0]


def test_a_folder_named_twice_is_compared_with_itself(sets: Path) -> None:
    report = compare(sets / "source", [sets / "hdf5", sets / "hdf5"], quick())
    assert len(report.arms) == 3
    assert len(checksums(report)) == 1


def test_one_set_may_be_given_by_itself(sets: Path) -> None:
    assert len(compare(str(sets / "source"), str(sets / "lmdb"), quick()).arms) == 2


def test_mixed_sizes_and_modes(tmp_path: Path, draw_image: Callable[..., bytes], pack_files: Any) -> None:
    """Case 49: the default transform makes one size and three channels of anything."""
    kinds = [("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGB", "JPEG"), ("RGBA", "PNG"), ("CMYK", "JPEG")]
    sizes = [(8, 8), (31, 9), (5, 40), (64, 48), (17, 3)]
    files = {
        f"{mode}/{number}": draw_image(number, size, mode, format)
        for mode, format in kinds
        for number, size in enumerate(sizes)
    }
    packed = pack_files(tmp_path, {f"{name}.img": data for name, data in files.items()}, "hdf5", all_files=True)
    report = compare(packed.source, packed.root, quick(batch_size=8))
    assert report.images["measured"] == 30
    assert len(checksums(report)) == 1


def test_broken_exif_and_orientations(tmp_path: Path, draw_image: Callable[..., bytes], pack_files: Any) -> None:
    """Cases 62 and 63: both arms turn, or do not turn, and none of them warns (warnings are errors here)."""
    exif = {0: b"Exif\0\0II*\0\xff\xff\xff\x7f"}  # an IFD far past the end
    for value in (0, 1, 3, 6, 99):
        exif[len(exif)] = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0" + bytes([value, 0, 0, 0, 0, 0, 0, 0])
    files = {f"a/{number}.jpg": draw_image(number, exif=block) for number, block in exif.items()}
    packed = pack_files(tmp_path, files, "lmdb")
    plain, turned = (compare(packed.source, packed.root, quick(exif_transpose=turn)) for turn in (False, True))
    assert plain.images["measured"] == turned.images["measured"] == len(files)
    assert len(checksums(plain)) == len(checksums(turned)) == 1
    assert checksums(plain) != checksums(turned)


def test_sets_without_labels_and_in_another_order(sets: Path, tmp_path: Path, pack_tree: Any) -> None:
    for name, options in {"plain": {}, "shuffled": {"shuffle": 5}}.items():
        pack_tree(sets / "source", tmp_path / name, "hdf5", labels="none", **options)
    report = compare(sets / "source", [tmp_path / "shuffled", tmp_path / "plain"], quick())
    assert len(checksums(report)) == 1


def test_draw_follows_from_the_seed_and_has_the_ends() -> None:
    assert sorted(draw(50, 0, seed=1)) == list(range(50))
    assert draw(50, 10, seed=1) == draw(50, 10, seed=1) != draw(50, 10, seed=2)
    checked = draw(10**9, 64, seed=0, ends=True)
    assert checked[:2] == [0, 10**9 - 1]
    assert len(set(checked)) == len(checked) == 64
    assert draw(1, 64, seed=0, ends=True) == [0]


# -- what differs is refused


def flip_a_byte(packed: Any, image: bytes) -> None:
    file = next(path for path in packed.root.rglob("*.*") if image in path.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(image) + len(image) // 2] ^= 1
    file.write_bytes(data)


def test_a_tampered_shard_is_one_line_and_status_1(
    container: str, tmp_path: Path, image_tree: Callable[..., Path], pack_tree: Any
) -> None:
    packed = pack_tree(image_tree(tmp_path / "source"), tmp_path / "out", container)
    flip_a_byte(packed, packed.images[3])
    assert_one_line(shards_compare(packed.source, packed.root), 1, packed.keys[3], "do not match their checksum")


def test_a_truncated_shard_is_one_line_and_status_1(tmp_path: Path, sets: Path, pack_tree: Any) -> None:
    packed = pack_tree(sets / "source", tmp_path / "out", "hdf5")
    os.truncate(packed.shard_file(0), 5000)
    assert_one_line(shards_compare(packed.source, packed.root), 1, "5,000 bytes, but the manifest says")


def test_a_changed_source_is_one_line_and_status_1(
    tmp_path: Path, image_tree: Callable[..., Path], pack_tree: Any, draw_image: Callable[..., bytes]
) -> None:
    packed = pack_tree(image_tree(tmp_path / "source"), tmp_path / "out", "hdf5")
    changed = packed.source / packed.keys[2]
    changed.write_bytes(draw_image(99))
    assert_one_line(shards_compare(packed.source, packed.root), 1, packed.keys[2], "other pixels", "pack it again")
    changed.write_bytes(draw_image(99, size=(9, 9)))
    assert_one_line(shards_compare(packed.source, packed.root), 1, packed.keys[2], "another size")
    changed.write_bytes(packed.images[2] + b"\0")  # the same pixels in other bytes
    assert_one_line(
        shards_compare(packed.source, packed.root), 1, packed.keys[2], f"{len(packed.images[2]) + 1:,} bytes"
    )
    changed.write_bytes(b"no image")
    assert_one_line(shards_compare(packed.source, packed.root), 1, packed.keys[2], "cannot be decoded")
    changed.unlink()
    assert_one_line(shards_compare(packed.source, packed.root), 1, packed.keys[2], "No such file or directory")


def test_sets_of_other_sources_are_refused(sets: Path, tmp_path: Path, image_tree: Any, pack_tree: Any) -> None:
    pack_tree(image_tree(tmp_path / "few", classes=3, per_class=7), tmp_path / "fewer", "hdf5")
    pack_tree(image_tree(tmp_path / "two", classes=2, per_class=12), tmp_path / "others", "hdf5")
    with pytest.raises(CompareError, match=r"holds 24 images, .* 21: pack the same source"):
        compare(sets / "source", [sets / "hdf5", tmp_path / "fewer"], quick())
    with pytest.raises(CompareError, match="have different classes"):
        compare(sets / "source", [sets / "hdf5", tmp_path / "others"], quick())
    (tmp_path / "two" / "c1").rename(tmp_path / "two" / "c2")
    with pytest.raises(CompareError, match=r"c1/00\d\d.jpg: is in the packed set, but its file cannot be read"):
        compare(tmp_path / "two", tmp_path / "others", quick())


def test_only_files_below_the_source_are_read(sets: Path) -> None:
    """A hostile set must not make us read ``SOURCE/../secret``."""
    (packed,) = open_sets([str(sets / "hdf5")])
    for key in ("c0/../../secret", "/etc/passwd", "c0//x", "c0/x\0"):
        packed.key = lambda index, key=key: key  # type: ignore[method-assign]
        with pytest.raises(CompareError, match="names no file below a folder"):
            make_arms(str(sets / "source"), ["x"], [packed], [0])


# -- wrong usage


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("nowhere", "hdf5"), "nowhere: no such folder"),
        (("source", "nowhere"), "nowhere: no such folder. Give the folder that `pack` wrote"),
        (("source", "source"), "not a finished packed set"),
        (("source", "hdf5", "--device", "tpu"), "device must be one of auto, cpu, cuda, got 'tpu'"),
        (("source", "hdf5", "--start-method", "magic"), "start-method must be one of"),
        (("source", "hdf5", "--max-seconds", "0"), "max-seconds must be above 0 seconds"),
        (("source", "hdf5", "--timeout", "nan"), "timeout must be above 0 seconds"),
        (("source", "hdf5", "--max-images", "3"), "3 images are one batch of 4"),
        (("source", "hdf5", "--prefetch-factor", "0"), "prefetch-factor must be a whole number, at least 1"),
        (("source", "hdf5", "--json", "nowhere/x.json"), "cannot be written"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    sets: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], part: str
) -> None:
    monkeypatch.chdir(sets)
    assert_one_line(shards_compare(*words), 2, part)


def test_workers_below_zero_and_absent_cuda_are_wrong_usage(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompareUsageError, match="num-workers must be a whole number, at least 0, got -1"):
        quick(num_workers=-1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CompareUsageError, match="finds no CUDA device"):
        compare(sets / "source", sets / "hdf5", quick(device="cuda"))


def test_ctrl_c_is_one_line_and_status_130(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("readers.compare.run.compare", interrupted)
    assert_one_line(shards_compare(sets / "source", sets / "hdf5"), 130, "interrupted")


# -- what fails in workers


class SleepInWorker(SquareTensor):
    """Hangs, but only in a worker."""

    def __call__(self, image: Any) -> torch.Tensor:
        if get_worker_info() is not None:
            time.sleep(60)
        return super().__call__(image)


class FailInWorker(SquareTensor):
    """Fails, but only in a worker."""

    def __call__(self, image: Any) -> torch.Tensor:
        if get_worker_info() is not None:
            raise ZeroDivisionError("of no use\nat all")
        return super().__call__(image)


def test_a_hang_becomes_an_error(sets: Path) -> None:
    """Case 3: a worker that never answers."""
    options = quick(num_workers=1, timeout_seconds=0.5, transform=SleepInWorker(8))
    with pytest.raises(CompareError, match=r"the workers hang.*DataLoader timed out after 0.5 seconds"):
        compare(sets / "source", sets / "hdf5", options)


def test_an_error_in_a_worker_is_one_line(sets: Path) -> None:
    with pytest.raises(CompareError) as raised:
        compare(sets / "source", sets / "hdf5", quick(num_workers=1, transform=FailInWorker(8)))
    assert str(raised.value) == "ZeroDivisionError: of no use"


def test_samples_that_do_not_collate_are_one_line(sets: Path) -> None:
    with pytest.raises(CompareError, match="samples cannot be put into a batch: TypeError"):
        compare(sets / "source", sets / "hdf5", quick(transform=type))


@pytest.mark.skipif(sys.platform != "linux", reason="drops the page cache")
def test_cold_figures_say_what_was_dropped(sets: Path) -> None:
    report = compare(sets / "source", sets / "lmdb", quick(cold=True, repeats=2))
    assert [table.cache for table in report.tables] == ["warm", "cold"]
    dropped = [arm.dropped for arm in report.tables[1].arms]
    assert [each.files for each in dropped if each is not None] == [24, 3]
    text = "\n".join(report.lines())
    assert "Not dropped: directory entries and inodes" in text
    assert "  files: 24 files, " in text


# -- the command


def test_json_holds_what_a_benchmark_must(sets: Path, tmp_path: Path) -> None:
    result = shards_compare(sets / "source", sets / "hdf5", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert set(found) == {
        "command", "commit", "versions", "machine", "settings", "images", "arms", "shared_memory", "units", "repeats",
        "tables", "text",
    }  # fmt: skip
    assert found["versions"]["torch"] == torch.__version__.split("+")[0]
    assert found["settings"]["batch_size"] == 4
    assert set(found["arms"][0]["storage"]) == {"file_system", "device", "rotational", "model"}
    (table,) = found["tables"]
    assert table["cache"] == "warm"
    for arm in table["arms"]:
        rate = arm["images_per_second"]
        assert rate["p25"] == rate["median"] == rate["p75"] == rate["values"][0]
        assert arm["stages_ms"].keys() == {"read", "decode", "transform"}
    assert table["arms"][0]["ratio_to_files"] == 1.0
    assert result.stdout.splitlines() == found["text"]


def test_the_script_and_the_group_share_one_command() -> None:
    assert cli.commands["compare"] is compare_command


def test_importing_the_script_does_nothing(repository: Path) -> None:
    """Case 106: guarded, and nothing heavy is loaded for ``--help``."""
    code = (
        "import sys, runpy; runpy.run_path('scripts/compare_throughput.py', run_name='imported')\n"
        "import readers.compare.cli; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repository, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_script_works_under_spawn(sets: Path, repository: Path) -> None:
    """Case 106."""
    words = ["--start-method", "spawn", "--num-workers", "1", "--repeats", "1", "--batch-size", "4"]
    script = repository / "scripts" / "compare_throughput.py"
    done = subprocess.run(
        [sys.executable, str(script), "source", "hdf5", *words, "--device", "cpu", "--quiet"],
        capture_output=True, text=True, cwd=sets, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 worker (spawn)" in done.stdout
    assert "hdf5" in done.stdout
