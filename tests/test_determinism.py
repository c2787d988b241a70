"""Equal inputs and options give equal bytes: whatever the workers, the engine, the place and the hour."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from packer import PackOptions, pack
from packer import shard as shard_module

Hashes = Callable[[Path], dict[str, str]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, make_tree: Callable[..., Path], draw_image: Any) -> Path:
    """Three classes in folders of their own, some bad files, a name that is not UTF-8."""
    files = {
        f"{label}/{deep}{n}.jpg": draw_image(n, (20 + n, 30))
        for label in ("b", "a", "a-b")
        for deep in ("", "x/", "x-y/")
        for n in range(7)
    }
    files |= {"a/bad.jpg": draw_image(1)[:-20], "b/empty.jpg": b"", "b/\udcff.png": draw_image(5, format="PNG")}
    return make_tree(tmp_path_factory.mktemp("determinism") / "s", files)


def options(container: str, **others: Any) -> PackOptions:
    """Several shards, rejects allowed."""
    return PackOptions(**{"format": container, "shard_records": 9, "max_rejects": 5, "workers": 1, **others})


def test_case_91_workers_and_time_do_not_change_a_byte(
    tmp_path: Path, source: Path, container: str, file_hashes: Hashes
) -> None:
    first = tmp_path / "first"
    report = pack(source, first, options(container))
    assert (report.shards, report.packed, report.rejected) == (8, 64, 2)
    started = time.monotonic()
    for workers in (2, 5):
        pack(source, tmp_path / str(workers), options(container, workers=workers))
        assert file_hashes(tmp_path / str(workers)) == file_hashes(first)
    time.sleep(max(0.0, 1.1 - (time.monotonic() - started)))
    pack(source, tmp_path / "later", options(container))
    assert file_hashes(tmp_path / "later") == file_hashes(first)


def test_threads_inside_a_shard_do_not_change_a_byte(
    tmp_path: Path, source: Path, container: str, file_hashes: Hashes
) -> None:
    for workers in (1, 2, 8):
        pack(source, tmp_path / str(workers), options(container, workers=workers, shard_records=1000))
    assert file_hashes(tmp_path / "2") == file_hashes(tmp_path / "1")
    assert file_hashes(tmp_path / "8") == file_hashes(tmp_path / "1")


def test_any_executor_and_any_order_of_completion_give_the_same_bytes(
    tmp_path: Path, source: Path, container: str, file_hashes: Hashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(source, tmp_path / "alone", options(container))
    write = shard_module._write

    def delayed(job: Any, workspace: Any, number: int, *rest: Any) -> Any:
        time.sleep(0.05 * (8 - number))
        return write(job, workspace, number, *rest)

    monkeypatch.setattr(shard_module, "_write", delayed)
    with ThreadPoolExecutor(8) as executor:
        pack(source, tmp_path / "threads", options(container, workers=8), executor=executor)
    assert file_hashes(tmp_path / "threads") == file_hashes(tmp_path / "alone")


@pytest.mark.parametrize("container", ["hdf5", pytest.param("lmdb", marks=pytest.mark.slow)])
def test_place_environment_and_file_times_do_not_change_a_byte(
    tmp_path: Path, source: Path, container: str, file_hashes: Hashes, run_pack: Callable[..., Any]
) -> None:
    pack(source, tmp_path / "here", options(container))
    elsewhere = tmp_path / "else where" / "s"
    shutil.copytree(source, elsewhere)
    for path in elsewhere.rglob("*"):
        os.utime(path, (1, 1))
    environment = {
        **os.environ, "PYTHONHASHSEED": "77", "TZ": "Asia/Kathmandu", "LC_ALL": "C", "HOME": "/nonexistent",
    }  # fmt: skip
    done = run_pack(
        "s/../s/", "../out", "--format", container, "--shard-records", 9, "--max-rejects", 5, "--workers", 2,
        cwd=elsewhere.parent, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "here")
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            assert os.fsencode(tmp_path) not in path.read_bytes(), f"{path} holds the place where it was packed"


def test_a_run_in_pieces_gives_the_same_bytes(
    tmp_path: Path, source: Path, container: str, file_hashes: Hashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(source, tmp_path / "whole", options(container))
    write = shard_module._write
    stop_at = 0

    def stopping(job: Any, workspace: Any, number: int, *rest: Any) -> Any:
        if number == stop_at:
            raise KeyboardInterrupt
        return write(job, workspace, number, *rest)

    monkeypatch.setattr(shard_module, "_write", stopping)
    for stop_at in range(8):  # noqa: B007  `stopping` reads it
        with pytest.raises(KeyboardInterrupt):
            pack(source, tmp_path / "pieces", options(container))
    monkeypatch.undo()
    assert pack(source, tmp_path / "pieces", options(container)).resumed == 7
    assert file_hashes(tmp_path / "pieces") == file_hashes(tmp_path / "whole")


@pytest.mark.parametrize("container", ["hdf5", pytest.param("lmdb", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", [{"shuffle": 1}, {"shard_records": 10}, {"check": "header"}, {"labels": "none"}])
def test_options_that_matter_do_change_bytes(
    tmp_path: Path, source: Path, container: str, file_hashes: Hashes, change: dict[str, Any]
) -> None:
    # Guards the tests above: hashes that never differ would prove nothing.
    pack(source, tmp_path / "one", options(container))
    pack(source, tmp_path / "other", options(container, **change))
    assert file_hashes(tmp_path / "one") != file_hashes(tmp_path / "other")
