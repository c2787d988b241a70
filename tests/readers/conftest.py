"""Packed sets that the reading tests share."""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
from blake3 import blake3

from packer import PackOptions, pack
from packer.items import Record
from packer.publish import PrivateFile
from packer.writers import WRITERS
from readers.handles import Shard
from readers.layout import shard_name
from readers.manifest import Manifest

CHILD_SECONDS = 20


class PackedSet(NamedTuple):
    """A set and what went into it, record by record in the order of the set."""

    root: Path
    source: Path
    container: str
    keys: list[str]
    images: list[bytes]
    labels: list[int]

    def shard_file(self, number: int) -> Path:
        return self.root / shard_name(number, self.container)

    def facts(self, number: int = 0) -> dict[str, Any]:
        """What the manifest says of a shard: the arguments of `Shard`."""
        manifest = Manifest.load(self.root)
        return {
            "path": str(self.shard_file(number)),
            "shard_id": manifest.shard_ids[number],
            "records": manifest.shard_records[number],
            "file_bytes": manifest.shard_bytes[number],
            "container": self.container,
        }

    def open(self, number: int = 0, **changes: Any) -> Shard:
        """A handle of one shard, past the dataset; ``changes`` replace what the manifest says of it."""
        return Shard(**(self.facts(number) | changes))


def imagefolder_order(keys: list[str], *, labelled: bool = True) -> list[str]:
    """Keys as torchvision lists them, said without our own ``order_key``."""

    def place(key: str) -> tuple[str, list[str]]:
        folder, _, name = key.rpartition("/")
        return key.split("/")[0] if labelled else "", [folder, name]

    return sorted(keys, key=place)


@pytest.fixture(scope="session")
def pack_files(make_tree: Callable[..., Path]) -> Callable[..., PackedSet]:
    """``pack_files(folder, {"a/x.png": data}, container, **options) -> PackedSet``, one process, nothing rejected."""

    def make(folder: Path, files: Mapping[str, bytes], container: str, **options: Any) -> PackedSet:
        source = make_tree(folder / "source", files)
        return pack_source(source, folder / container, container, **options)

    return make


@pytest.fixture(scope="session")
def pack_tree() -> Callable[..., PackedSet]:
    """``pack_tree(source, out, container, **options) -> PackedSet``."""
    return pack_source


def pack_source(source: Path, out: Path, container: str, **options: Any) -> PackedSet:
    report = pack(source, out, PackOptions(**({"format": container, "workers": 1} | options)))
    keys = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    assert report.rejected == 0
    assert report.packed == len(keys)
    labelled = report.classes is not None
    keys = imagefolder_order(keys, labelled=labelled)
    classes = sorted({key.split("/")[0] for key in keys})
    labels = [classes.index(key.split("/")[0]) if labelled else -1 for key in keys]
    return PackedSet(out, source, container, keys, [(source / key).read_bytes() for key in keys], labels)


@pytest.fixture(scope="session")
def small_sets(tmp_path_factory: pytest.TempPathFactory, draw_image: Callable[..., bytes]) -> dict[str, PackedSet]:
    """Twenty pictures of two classes in shards of seven, in each container; do not change the files."""
    folder = tmp_path_factory.mktemp("small")
    for number in range(20):
        path = folder / "source" / "ab"[number // 10] / f"{number % 10}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw_image(number, (9, 8), format="PNG"))
    return {
        name: pack_source(folder / "source", folder / name, name, shard_records=7, shard_size="1MiB")
        for name in ("hdf5", "lmdb")
    }


@pytest.fixture
def small(container: str, small_sets: dict[str, PackedSet]) -> PackedSet:
    """The small set of one container; do not change the files."""
    return small_sets[container]


@pytest.fixture
def small_copy(small: PackedSet, tmp_path: Path) -> PackedSet:
    """A copy of the small set, to be damaged."""
    shutil.copytree(small.root, tmp_path / "copy")
    return small._replace(root=tmp_path / "copy")


@pytest.fixture(scope="session")
def write_set() -> Callable[..., Path]:
    """``write_set(root, container, [shard, ...]) -> root``: a set from (image, key, label) lists, past the scan.

    Quick for very many records. A shard given as a number is a hard link to the shard of that number.
    """
    return _write_set


def _write_set(root: Path, container: str, shards: Iterable[Iterable[tuple[bytes, bytes, int]] | int]) -> Path:
    facts: list[tuple[int, int, str, str]] = []
    classes = 0
    for number, shard in enumerate(shards):
        path = root / shard_name(number, container)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(shard, int):
            os.link(root / shard_name(shard, container), path)
            facts.append(facts[shard])
            continue
        private = PrivateFile(str(path.parent), 0o644)
        writer = WRITERS[container](private)
        for image, key, label in shard:
            writer.add(Record(image, key, label, 0, 0, 0, 0, 0, 0))
            classes = max(classes, label + 1)
        done = writer.finish()
        private.publish(str(path))
        facts.append((done.records, path.stat().st_size, done.shard_id, blake3(path.read_bytes()).hexdigest()))
    records = sum(count for count, *_ in facts)
    manifest = Manifest(
        container=container,
        classes=tuple(f"c{number:06d}" for number in range(classes)) or None,
        class_counts=(records, *(0,) * (classes - 1)) if classes else None,
        records=records,
        rejected=0,
        options={},
        source={},
        created_by="tests",
        shard_records=tuple(fact[0] for fact in facts),
        shard_bytes=tuple(fact[1] for fact in facts),
        shard_ids=tuple(fact[2] for fact in facts),
        shard_blake3s=tuple(fact[3] for fact in facts),
    )
    (root / "manifest.json").write_bytes(manifest.to_bytes())
    return root


@pytest.fixture(scope="session")
def in_child() -> Callable[[Callable[[], Any]], Any]:
    """``in_child(function) -> result``, run in a forked child; its exception is raised here, a hang is an error."""
    return _in_child


def _in_child(function: Callable[[], Any]) -> Any:
    receiver, sender = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _run_and_leave(function, sender)
    os.close(sender)
    try:
        ready, _, _ = select.select([receiver], [], [], CHILD_SECONDS)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        with os.fdopen(receiver, "rb") as pipe:
            data = pipe.read()
    finally:
        _, status = os.waitpid(pid, 0)
    if not data:
        raise AssertionError(f"the child hung, or died by {os.waitstatus_to_exitcode(status)}")
    good, value = pickle.loads(data)
    if not good:
        raise value
    return value


def _run_and_leave(function: Callable[[], Any], sender: int) -> NoReturn:
    status = 1
    try:
        try:
            answer = pickle.dumps((True, function()))
        except BaseException as error:  # noqa: BLE001  whatever it is, the parent shall see it
            answer = pickle.dumps((False, error))
        with os.fdopen(sender, "wb") as pipe:
            pipe.write(answer)
        status = 0
    finally:
        os._exit(status)
