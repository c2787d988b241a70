"""`packer/engines.py`: shards in this process, in a pool, on any executor; and what a pool does when it breaks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from packer import PackError, PackOptions, engines, pack
from packer import run as run_module
from packer.shard import ShardJob

JOB = ShardJob("s", "o", "hdf5", "decode", None, 1)


def nothing(*_: Any) -> None:
    """Progress that nobody looks at."""


class Counting(ThreadPoolExecutor):
    """An executor that knows how many of its tasks are not yet done."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.flying = self.most = 0
        self._lock = threading.Lock()

    def submit(self, *words: Any, **named: Any) -> Future[Any]:
        with self._lock:
            self.flying += 1
            self.most = max(self.most, self.flying)
        future = super().submit(*words, **named)
        future.add_done_callback(self._landed)
        return future

    def _landed(self, _: Future[Any]) -> None:
        with self._lock:
            self.flying -= 1


def test_no_more_than_two_shards_a_worker_fly(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(job: ShardJob, number: int, advance: Any) -> dict[str, Any]:
        time.sleep(0.03)
        return {"number": number}

    monkeypatch.setattr(engines, "pack_shard", slow)
    monkeypatch.setattr(engines, "_POLL_SECONDS", 0.001)
    done: dict[int, dict[str, Any]] = {}
    with Counting(2) as executor:
        engines.run_shards(JOB, range(20), 2, done.__setitem__, nothing, executor)
    assert done == {number: {"number": number} for number in range(20)}
    assert executor.most <= 4


def test_an_error_of_a_shard_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []

    def failing(job: ShardJob, number: int, advance: Any) -> dict[str, Any]:
        if number == 3:
            raise PackError("the disk is in trouble")
        packed.append(number)
        return {}

    monkeypatch.setattr(engines, "pack_shard", failing)
    with ThreadPoolExecutor(1) as executor, pytest.raises(PackError, match="in trouble"):
        engines.run_shards(JOB, range(1000), 1, nothing, nothing, executor)
    assert len(packed) < 20
    packed.clear()
    with pytest.raises(PackError, match="in trouble"):
        engines.run_shards(JOB, range(1000), 1, nothing, nothing)
    assert packed == [0, 1, 2]


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_adds_up(
    tmp_path: Path, image_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    source = image_tree(tmp_path / "s", per_class=40)
    (source / "c0" / "0001.jpg").write_bytes(b"")
    sums = {"scanning": [0, 0], "packing": [0, 0]}
    real = run_module.Progress

    class Noted(real):  # type: ignore[misc, valid-type]
        def __init__(self, stage: str, *words: Any, **named: Any) -> None:
            super().__init__(stage, *words, **named)
            self.sums = sums[stage]

        def advance(self, files: int, size: int = 0) -> None:
            assert files >= 0
            assert size >= 0
            self.sums[0] += files
            self.sums[1] += size

    monkeypatch.setattr(run_module, "Progress", Noted)
    pack(source, tmp_path / "o", PackOptions(workers=workers, shard_records=9, max_rejects=1))
    assert sums["scanning"][0] == 80
    assert sums["packing"] == [80, sum(path.stat().st_size for path in source.rglob("*.jpg"))]


def test_an_error_in_a_worker_process_is_that_of_the_run(tmp_path: Path, image_tree: Callable[..., Path]) -> None:
    source = image_tree(tmp_path / "s", per_class=10)
    (tmp_path / "o").mkdir()

    # A shard's folder that is a file: the first worker to publish fails.
    (tmp_path / "o" / ".pack").mkdir()
    (tmp_path / "o" / "shards").write_bytes(b"")
    with pytest.raises(PackError, match="cannot write to") as caught:
        pack(source, tmp_path / "o", PackOptions(workers=2, shard_records=4))
    assert caught.value.exit_status == 1
    assert list((tmp_path / "o/.pack/tmp").glob("*")) == []


@pytest.mark.parametrize(
    "error",
    [
        BrokenProcessPool("a worker died"), OSError("handle is closed"),
        RuntimeError("cannot schedule new futures after shutdown"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_a_pool_that_breaks_while_shards_are_handed_out_is_retried(
    tmp_path: Path, image_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, file_hashes: Any, error: Exception
) -> None:
    # `submit` races with the thread that takes a broken pool apart, and then says so in one of these ways.
    source = image_tree(tmp_path / "s", per_class=10)
    options = PackOptions(workers=2, shard_records=4)
    submit, calls = ProcessPoolExecutor.submit, []

    def broken(self: Any, *words: Any, **named: Any) -> Any:
        calls.append(words)
        if len(calls) == 3:
            raise error
        return submit(self, *words, **named)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", broken)
    assert pack(source, tmp_path / "o", options).packed == 20
    monkeypatch.undo()
    pack(source, tmp_path / "clean", PackOptions(workers=1, shard_records=4))
    assert file_hashes(tmp_path / "o") == file_hashes(tmp_path / "clean")


def test_a_pool_that_always_breaks_names_the_shard(
    tmp_path: Path, image_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise BrokenProcessPool("a worker died")

    monkeypatch.setattr(ProcessPoolExecutor, "submit", broken)
    with pytest.raises(PackError, match=r"the worker that packs shard 0 died 3 times"):
        pack(image_tree(tmp_path / "s"), tmp_path / "o", PackOptions(workers=2, shard_records=2))


def test_a_script_without_main_guard_is_told_so(tmp_path: Path, image_tree: Callable[..., Path]) -> None:
    image_tree(tmp_path / "s", per_class=6)
    script = tmp_path / "script.py"
    script.write_text(
        "from packer import PackOptions, PackError, pack\n"
        "try:\n"
        "    pack('s', 'o', PackOptions(shard_records=2, workers=2))\n"
        "except PackError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr
    assert "__main__" in done.stdout
