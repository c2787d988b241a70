"""Kill the packer at any moment: nothing half-made shows, the same command goes on, the bytes are the same."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from packer import PackError, PackOptions, pack
from readers import Manifest, ShardDataset, UnfinishedSetError

pytestmark = pytest.mark.timeout(120)

Hashes = Callable[[Path], dict[str, str]]
SHARD_RECORDS = 5
#: Seconds that a test waits for something to happen.
PATIENCE = 30.0
#: Both containers, the second one only in a full run: what these tests are about is the same code.
QUICK = ["hdf5", pytest.param("lmdb", marks=pytest.mark.slow)]


def slow_tree(root: Path, draw_image: Callable[..., bytes], count: int) -> Path:
    """Links to four pictures of 4 megapixels: some 10 ms to check, almost no room on the disk."""
    folder = root / "s" / "c"
    folder.mkdir(parents=True)
    for number in range(4):
        (root / f"{number}.jpg").write_bytes(draw_image(number, (2400, 1600)))
    for number in range(count):
        os.link(root / f"{number % 4}.jpg", folder / f"{number:04d}.jpg")
    return root / "s"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, draw_image: Callable[..., bytes]) -> Path:
    """A source that takes about a second."""
    return slow_tree(tmp_path_factory.mktemp("crash"), draw_image, 80)


@pytest.fixture(scope="module")
def long_source(tmp_path_factory: pytest.TempPathFactory, draw_image: Callable[..., bytes]) -> Path:
    """A source that takes longer than any test waits."""
    return slow_tree(tmp_path_factory.mktemp("long"), draw_image, 2000)


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory, file_hashes: Hashes) -> dict[str, Any]:
    """Hashes of the set that nobody disturbed, by container."""
    found = {}
    for container in ("hdf5", "lmdb"):
        out = tmp_path_factory.mktemp("undisturbed") / container
        pack(source, out, options(container))
        found[container] = file_hashes(out)
    return found


def options(container: str, **others: Any) -> PackOptions:
    """The options that `words` spells out."""
    return PackOptions(**{"format": container, "shard_records": SHARD_RECORDS, "workers": 1, **others})


class Running:
    """The command in a session of its own, so that all its processes can be found and killed."""

    def __init__(self, source: Path, out: Path, container: str, workers: int, scratch: Path) -> None:
        scratch.mkdir(exist_ok=True)
        self.out = out
        self.scratch = scratch
        command = [
            sys.executable, "-m", "packer", str(source), str(out), "--format", container,
            "--shard-records", str(SHARD_RECORDS), "--workers", str(workers),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(scratch)}, cwd=Path(__file__).parents[1],
        )  # fmt: skip

    def members(self) -> list[psutil.Process]:
        """Living processes of the session."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def workers(self) -> list[psutil.Process]:
        """Those that pack: children of the fork server."""
        members = self.members()
        parents = {process.pid for process in members} - {self.process.pid}
        with contextlib.suppress(psutil.Error):
            return [process for process in members if process.ppid() in parents]
        return []

    def wait_for(self, what: Callable[[], Any]) -> Any:
        """Wait until something is so, while the command runs."""
        end = time.monotonic() + PATIENCE
        while not (found := what()):
            assert time.monotonic() < end, "it never happened"
            assert self.process.poll() is None, "the command ended before"
            time.sleep(0.005)
        return found

    def wait_for_shards(self, count: int = 1) -> None:
        """Wait until some shards bear their final names."""
        self.wait_for(lambda: len(list(self.out.glob("shards/*/*"))) >= count)

    def kill(self) -> None:
        """SIGKILL for all of them; returns when all are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        assert self.gone_within(5)

    def gone_within(self, seconds: float) -> bool:
        """Are all processes of the session gone by then?"""
        end = time.monotonic() + seconds
        while self.members():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def leftovers(self) -> list[Path]:
        """Temporary files, in the output and in the folder for such things."""
        return [path for top in (self.out / ".pack" / "tmp", self.scratch) for path in top.rglob("*")]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """``start(source, out, container, workers=2) -> Running``; whatever is left is killed at the end."""
    started = []

    def begin(source: Path, out: Path, container: str, workers: int = 2) -> Running:
        started.append(Running(source, out, container, workers, tmp_path / "scratch"))
        return started[-1]

    yield begin
    for running in started:
        running.kill()


def finished_shards(out: Path) -> dict[str, tuple[int, int]]:
    """(inode, mtime) of the shards that have a receipt."""
    found = {}
    for receipt in out.glob(".pack/receipts/*/*.json"):
        with contextlib.suppress(ValueError):
            json.loads(receipt.read_bytes())
            for path in out.glob(f"shards/*/{receipt.stem}.*"):
                status = path.stat()
                found[str(path.relative_to(out))] = (status.st_ino, status.st_mtime_ns)
    return found


def assert_nothing_half_made(out: Path, whole: dict[str, str], file_hashes: Hashes) -> None:
    """What bears a final name is complete; a set without a manifest cannot be mistaken for one."""
    if (out / "shards").exists():
        for name, found in file_hashes(out / "shards").items():
            assert found == whole[f"shards/{name}"], f"{name} bears its final name and is not what it should be"
    try:
        dataset = ShardDataset(out, decode="bytes")
    except UnfinishedSetError:
        return
    assert len(dataset) == Manifest.load(out).records == sum(1 for _ in dataset)


def assert_goes_on(source: Path, out: Path, container: str, whole: dict[str, str], file_hashes: Hashes) -> None:
    """The same command completes the set, rewriting nothing that was finished."""
    finished = finished_shards(out)
    pack(source, out, options(container))
    assert file_hashes(out) == whole
    for name, (inode, mtime_ns) in finished.items():
        status = (out / name).stat()
        assert (status.st_ino, status.st_mtime_ns) == (inode, mtime_ns), f"{name} was finished and was made again"


# -- kill -9


def kill_once(
    start: Any, source: Path, out: Path, container: str, random_: random.Random, whole: Any, file_hashes: Hashes
) -> None:
    """Kill everything at a random moment, look, and go on."""
    running = start(source, out, container, random_.choice((1, 2, 3)))
    if random_.random() < 0.7:
        with contextlib.suppress(AssertionError):
            running.wait_for(lambda: (out / ".pack" / "lock").exists())
        time.sleep(random_.uniform(0, 1.2))
    else:
        time.sleep(random_.uniform(0, 1.0))
    running.kill()
    assert_nothing_half_made(out, whole, file_hashes)
    assert_goes_on(source, out, container, whole, file_hashes)


@pytest.mark.parametrize(("container", "seed"), [("hdf5", 0), ("lmdb", 1), ("hdf5", 2)])
def test_kill_9_at_a_random_moment(
    tmp_path: Path, source: Path, start: Any, undisturbed: Any, file_hashes: Hashes, container: str, seed: int
) -> None:
    kill_once(start, source, tmp_path / "o", container, random.Random(seed), undisturbed[container], file_hashes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_kill_9_at_many_random_moments(
    tmp_path: Path, source: Path, start: Any, undisturbed: Any, file_hashes: Hashes, container: str, seed: int
) -> None:
    kill_once(start, source, tmp_path / "o", container, random.Random(seed), undisturbed[container], file_hashes)


@pytest.mark.slow
def test_kill_9_again_and_again(
    tmp_path: Path, source: Path, start: Any, undisturbed: Any, file_hashes: Hashes, container: str
) -> None:
    out, random_ = tmp_path / "o", random.Random(5)
    for _ in range(3):
        before = finished_shards(out)
        running = start(source, out, container, 2)
        with contextlib.suppress(AssertionError):
            running.wait_for(lambda before=before: len(finished_shards(out)) > len(before) + 1)
        time.sleep(random_.uniform(0, 0.1))
        running.kill()
        if (out / "manifest.json").exists():  # it was quicker than we are
            break
        now = finished_shards(out)
        assert before == {name: now[name] for name in before}
        assert_nothing_half_made(out, undisturbed[container], file_hashes)
    assert_goes_on(source, out, container, undisturbed[container], file_hashes)


@pytest.mark.parametrize("left", [(), (".pack",), (".pack", ".pack/tmp"), (".pack", ".pack/plan")])
def test_killed_while_making_or_dropping_its_folders(
    tmp_path: Path, image_tree: Callable[..., Path], left: tuple[str, ...]
) -> None:
    # Between making OUT/.pack and the lock in it, and while deleting them again, a kill leaves just these.
    source = image_tree(tmp_path / "s")
    (tmp_path / "o").mkdir()
    for name in left:
        (tmp_path / "o" / name).mkdir()
    assert pack(source, tmp_path / "o", PackOptions(workers=1)).packed == 6


@pytest.mark.parametrize("name", [".pack/plan.json", ".pack/receipts/0000/0000000.json"])
@pytest.mark.parametrize("cut", [0, -1])
@pytest.mark.parametrize("container", QUICK)
def test_work_files_cut_short_are_never_believed(
    tmp_path: Path, image_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, file_hashes: Hashes,
    container: str, name: str, cut: int,
) -> None:  # fmt: skip
    """Work files that were not on disk yet at a power cut: made again, and no dead end."""
    from packer import run

    source = image_tree(tmp_path / "s", per_class=10)
    pack(source, tmp_path / "whole", options(container))

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run._Run, "_publish_manifest", stopped)
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "o", options(container))
    monkeypatch.undo()
    path = tmp_path / "o" / name
    data = path.read_bytes()
    path.write_bytes(data[: cut if cut >= 0 else len(data) // 2])
    pack(source, tmp_path / "o", options(container))
    assert file_hashes(tmp_path / "o") == file_hashes(tmp_path / "whole")


def test_case_86_a_shard_without_a_receipt_is_made_again(
    tmp_path: Path, image_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, file_hashes: Hashes,
    container: str,
) -> None:  # fmt: skip
    from packer import run

    source = image_tree(tmp_path / "s", per_class=10)
    pack(source, tmp_path / "whole", options(container))

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run._Run, "_publish_manifest", stopped)
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "o", options(container))
    monkeypatch.undo()
    (tmp_path / "o/.pack/receipts/0000/0000001.json").unlink()
    shard = next((tmp_path / "o/shards/0000").glob("0000001.*"))
    shard.write_bytes(shard.read_bytes()[:-1000] + bytes(1000))
    next((tmp_path / "o/shards/0000").glob("0000002.*")).unlink()
    short = next((tmp_path / "o/shards/0000").glob("0000003.*"))
    os.truncate(short, short.stat().st_size // 2)
    stray = tmp_path / "o/shards/0000" / f"0000017{shard.suffix}"
    stray.write_bytes(b"of another plan")
    (tmp_path / "o/.pack/tmp").mkdir(exist_ok=True)
    (tmp_path / "o/.pack/tmp/tmp-dead").write_bytes(b"half")
    assert pack(source, tmp_path / "o", options(container)).resumed == 1
    assert file_hashes(tmp_path / "o") == file_hashes(tmp_path / "whole")


# -- Ctrl-C and SIGTERM


def interrupt(running: Running, number: int, to_group: bool) -> None:
    """Send the signal, and hold the command to what it promises."""
    before = len(list(running.out.glob("shards/*/*")))
    sent = time.monotonic()
    os.killpg(running.process.pid, number) if to_group else os.kill(running.process.pid, number)
    _, stderr = running.process.communicate(timeout=10)
    took = time.monotonic() - sent
    assert running.process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[signal.Signals(number)], stderr
    assert took < 2, f"took {took:.1f} s"
    assert "Traceback" not in stderr
    assert len(stderr.splitlines()) <= 3
    assert "Rerun the same command to continue" in stderr
    assert running.gone_within(1), running.members()
    assert running.leftovers() == []
    assert len(list(running.out.glob("shards/*/*"))) >= before
    assert not (running.out / "manifest.json").exists()


@pytest.mark.parametrize(
    ("number", "workers", "to_group"),
    [
        (signal.SIGINT, 2, True), (signal.SIGTERM, 2, False), (signal.SIGINT, 1, True),
        pytest.param(signal.SIGTERM, 1, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_interrupted_while_packing(
    tmp_path: Path, long_source: Path, start: Any, number: int, workers: int, to_group: bool
) -> None:
    running = start(long_source, tmp_path / "o", "hdf5", workers)
    running.wait_for_shards(2)
    interrupt(running, number, to_group)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_at_many_random_moments(
    tmp_path: Path, long_source: Path, start: Any, container: str, number: int, seed: int
) -> None:
    random_ = random.Random(seed)
    running = start(long_source, tmp_path / "o", container, random_.choice((1, 2, 2)))
    running.wait_for(lambda: (tmp_path / "o" / ".pack" / "lock").exists())
    time.sleep(random_.uniform(0, 1.5))
    interrupt(running, number, random_.random() < 0.5)


@pytest.mark.parametrize("container", QUICK)
def test_an_interrupted_run_goes_on(
    tmp_path: Path, source: Path, start: Any, undisturbed: Any, file_hashes: Hashes, container: str
) -> None:
    running = start(source, tmp_path / "o", container)
    running.wait_for_shards(2)
    interrupt(running, signal.SIGINT, True)
    assert_nothing_half_made(tmp_path / "o", undisturbed[container], file_hashes)
    assert_goes_on(source, tmp_path / "o", container, undisturbed[container], file_hashes)


def deaf_to_ctrl_c(process: psutil.Process) -> bool:
    """Does the process ignore SIGINT, or hold it back?"""
    with contextlib.suppress(OSError):
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        return any(int(lines[name], 16) >> (signal.SIGINT - 1) & 1 for name in ("SigIgn", "SigBlk"))
    return False


def test_workers_leave_ctrl_c_to_the_parent(tmp_path: Path, source: Path, start: Any) -> None:
    # A terminal sends it to the whole group; a worker that took it would print a traceback and break the pool.
    running = start(source, tmp_path / "o", "hdf5", 2)
    running.wait_for(lambda: len(found := running.workers()) == 2 and all(map(deaf_to_ctrl_c, found)))
    for worker in running.workers():
        worker.send_signal(signal.SIGINT)
    _, stderr = running.process.communicate(timeout=60)
    assert (running.process.returncode, stderr) == (0, "")


def test_workers_are_deaf_to_ctrl_c_from_birth(tmp_path: Path, source: Path, start: Any) -> None:
    running = start(source, tmp_path / "o", "hdf5", 2)
    running.wait_for(running.workers)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:  # while they import what they need, and after
        for worker in running.workers():
            with contextlib.suppress(psutil.Error):
                worker.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, stderr = running.process.communicate(timeout=60)
    assert (running.process.returncode, stderr) == (0, "")


# -- processes that die


@pytest.mark.parametrize("container", QUICK)
def test_workers_die_with_a_killed_parent(tmp_path: Path, long_source: Path, start: Any, container: str) -> None:
    running = start(long_source, tmp_path / "o", container, 2)
    running.wait_for_shards(1)
    assert len(running.workers()) == 2
    running.process.kill()
    running.process.wait()
    assert running.gone_within(2), running.members()


@pytest.mark.parametrize("container", QUICK)
def test_a_killed_worker_is_noticed_and_the_run_completes(
    tmp_path: Path, source: Path, start: Any, undisturbed: Any, file_hashes: Hashes, container: str
) -> None:
    running = start(source, tmp_path / "o", container, 2)
    running.wait_for_shards(1)
    running.wait_for(running.workers)[0].kill()
    _, stderr = running.process.communicate(timeout=60)
    assert running.process.returncode == 0, stderr
    assert "Traceback" not in stderr
    assert file_hashes(tmp_path / "o") == undisturbed[container]
    assert running.gone_within(2)


def test_workers_that_are_killed_every_time_stop_the_run(
    tmp_path: Path, source: Path, start: Any, undisturbed: Any, file_hashes: Hashes
) -> None:
    running = start(source, tmp_path / "o", "hdf5", 2)
    end = time.monotonic() + 60
    while running.process.poll() is None:
        assert time.monotonic() < end
        for worker in running.workers():
            with contextlib.suppress(psutil.Error):
                worker.kill()
        time.sleep(0.01)
    _, stderr = running.process.communicate()
    assert running.process.returncode == 1
    assert len(stderr.splitlines()) == 1
    assert "died 3 times" in stderr
    assert "shard 0" in stderr
    assert running.gone_within(2)
    assert running.leftovers() == []
    assert_goes_on(source, tmp_path / "o", "hdf5", undisturbed["hdf5"], file_hashes)


# -- two packers


def test_a_second_packer_is_told_who_holds_the_folder(
    tmp_path: Path, source: Path, long_source: Path, start: Any
) -> None:
    running = start(long_source, tmp_path / "o", "hdf5", 1)
    running.wait_for_shards(1)
    for overwrite in (False, True):
        with pytest.raises(PackError, match=f"is being packed by process {running.process.pid} on ") as caught:
            pack(long_source, tmp_path / "o", options("hdf5", overwrite=overwrite))
        assert caught.value.exit_status == 1
    assert list((tmp_path / "o").glob("shards/*/*")), "the second one took something away"


@pytest.mark.parametrize("container", QUICK)
def test_two_at_once_make_one_whole_set(
    tmp_path: Path, source: Path, start: Any, undisturbed: Any, file_hashes: Hashes, container: str
) -> None:
    both = [start(source, tmp_path / "o", container, 1) for _ in range(2)]
    outcomes = [(running.process.communicate(timeout=60)[1], running.process.returncode) for running in both]
    assert file_hashes(tmp_path / "o") == undisturbed[container]
    assert sorted(status for _, status in outcomes) in ([0, 1], [0, 0]), outcomes
    for stderr, status in outcomes:
        assert status == 0 or "is being packed by process" in stderr
