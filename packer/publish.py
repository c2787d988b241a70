"""The only door to the output folder: what is visible under its final name is complete and on disk.

A file is written under a private name, flushed, linked to its final name without replacing anything,
and its folder flushed; only then may a receipt or a manifest speak of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import IO, Final

from readers.layout import CONTAINERS, FORMAT, MANIFEST_NAME, REJECTS_NAME, SHARDS_NAME, shard_name
from readers.system import file_size_limit

from .errors import PackError, PackUsageError

__all__ = ["OutputFolder", "PrivateFile", "free_bytes", "translate_os_errors"]

_WORK: Final = ".pack"
_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.ENOTSUP}
_NO_LOCKS: Final = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOTSUP}
_NO_SPACE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class PrivateFile:
    """A file being written under a private name.

    Attributes:
        path: The private name.
        fd: Open for reading and writing.
    """

    def __init__(self, folder: str, mode: int) -> None:
        self.fd, self.path = tempfile.mkstemp(dir=folder, prefix="tmp-")  # created exclusively, mode 0600
        self._mode = mode

    def write_at(self, offset: int, data: bytes | bytearray) -> None:
        """Write all of ``data`` at ``offset``."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self.fd, view, offset)
            view, offset = view[written:], offset + written

    def truncate(self, size: int) -> None:
        """Set the file's size in bytes."""
        os.ftruncate(self.fd, size)

    def publish(self, final: str) -> None:
        """Make the content durable and visible as ``final``; an existing file there is kept."""
        os.fchmod(self.fd, self._mode)
        os.fsync(self.fd)
        self._close()
        try:
            os.link(self.path, final)
        except FileExistsError:
            pass  # another packer was first, with the same bytes: they follow from the plan
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.replace(self.path, final)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        # The name is safe only when the folder is: a rename may be lost at power failure although the data are not.
        _fsync_folder(os.path.dirname(final))

    def discard(self) -> None:
        """Drop the file; never raises, since it runs while another error is on its way."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class OutputFolder:
    """Where a set is being packed: ``OUT`` and its work folder ``OUT/.pack``.

    Args:
        path: The output folder; made on `open` if it does not exist.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.work = os.path.join(path, _WORK)
        self._made: list[str] = []

    # -- taking and leaving it

    def check(self) -> None:
        """Refuse a path that cannot hold a set, before anything is written.

        Raises:
            PackUsageError: A file, or a folder with something else in it.
        """
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise PackUsageError(f"output {self.path!r} is not a folder")
        foreign = os.path.lexists(os.path.join(self.path, MANIFEST_NAME)) and not self.is_finished
        if foreign or (
            os.path.isdir(self.path) and os.listdir(self.path) and not (self.is_finished or self.is_started)
        ):
            raise PackUsageError(
                f"output {self.path!r} is not empty and holds no packed set: it is left alone. "
                "Give an empty or a new folder"
            )

    @property
    def is_finished(self) -> bool:
        """A finished set is there."""
        return os.path.isfile(os.path.join(self.path, MANIFEST_NAME)) and self._is_ours()

    @property
    def is_started(self) -> bool:
        """A run has begun here and not finished."""
        return os.path.isdir(self.work)

    def _is_ours(self) -> bool:
        with open(os.path.join(self.path, MANIFEST_NAME), "rb") as file:
            return f'"format":"{FORMAT}"'.encode() in file.read(200)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Hold the folder: made if need be, locked against a second packer, unlocked at the end.

        Raises:
            PackError: Another process packs here; the message names it.
        """
        with translate_os_errors(self.path):
            self._made = _missing_folders(self.path)
            os.makedirs(self.work, exist_ok=True)
        with _locked(os.path.join(self.work, "lock"), self.path):
            yield

    def leave_empty(self) -> None:
        """Take away what `open` made, when there turned out to be nothing to pack."""
        shutil.rmtree(self.work, ignore_errors=True)
        with contextlib.suppress(OSError):
            for folder in self._made:
                os.rmdir(folder)

    def finish(self) -> None:
        """Drop the work folder: the set is finished."""
        shutil.rmtree(self.work, ignore_errors=True)

    def clear_set(self) -> None:
        """Delete the set that is here: its manifest first, then every file of it, and nothing else."""
        for name in (MANIFEST_NAME, REJECTS_NAME):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))
        _fsync_folder(self.path)
        for path in self._shard_files():
            os.unlink(path)

    def clear_work(self) -> None:
        """Delete plan, receipts and temporary files of an earlier run; the lock stays."""
        for name in os.listdir(self.work):
            if name != "lock":
                shutil.rmtree(os.path.join(self.work, name), ignore_errors=True)
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.work, name))

    def clear_temporaries(self) -> None:
        """Delete what killed workers left; only while none runs."""
        shutil.rmtree(self._tmp, ignore_errors=True)

    def drop_strays(self, receipts: set[int], container: str) -> None:
        """Delete shards without a receipt: they were cut off between name and receipt, and will be made again."""
        known = {os.path.join(self.path, *shard_name(number, container).split("/")) for number in receipts}
        for path in self._shard_files():
            if path not in known:
                os.unlink(path)

    def _shard_files(self) -> Iterator[str]:
        top = os.path.join(self.path, SHARDS_NAME)
        for folder, _, names in os.walk(top):
            for name in names:
                stem, extension = os.path.splitext(name)
                if stem.isdigit() and len(stem) == 7 and extension in CONTAINERS.values():
                    yield os.path.join(folder, name)

    # -- writing into it

    @property
    def _tmp(self) -> str:
        return os.path.join(self.work, "tmp")

    def private_file(self) -> PrivateFile:
        """A new private file on the file system of the output."""
        os.makedirs(self._tmp, exist_ok=True)
        return PrivateFile(self._tmp, 0o666 & ~_umask())

    def scratch(self) -> IO[bytes]:
        """A nameless temporary file."""
        os.makedirs(self._tmp, exist_ok=True)
        return tempfile.TemporaryFile(dir=self._tmp)

    def publish_shard(self, private: PrivateFile, number: int, container: str) -> None:
        """Give a shard its final name."""
        self._publish(private, os.path.join(self.path, *shard_name(number, container).split("/")))

    def write(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Publish a small file under ``name``, relative to the output folder."""
        final = os.path.join(self.path, *name.split("/"))
        if replace:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(final)
        private = self.private_file()
        try:
            private.write_at(0, data)
            self._publish(private, final)
        except BaseException:
            private.discard()
            raise

    def _publish(self, private: PrivateFile, final: str) -> None:
        _make_folders(os.path.dirname(final), self.path)
        private.publish(final)

    def work_name(self, kind: str, number: int, extension: str) -> str:
        """Name of a shard's file in the work folder, 1,000 a folder."""
        return f"{_WORK}/{kind}/{number // 1000:04d}/{number:07d}{extension}"

    def work_path(self, name: str) -> str:
        """Path of a name in the output folder."""
        return os.path.join(self.path, *name.split("/"))

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[IO[bytes]]:
        """A work file to write as data come; on disk when the block ends."""
        path = self.work_path(name)
        _make_folders(os.path.dirname(path), self.path)
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _fsync_folder(os.path.dirname(path))


def _missing_folders(folder: str) -> list[str]:
    """``folder`` and those above it that do not exist, innermost first."""
    missing = []
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def _make_folders(folder: str, top: str) -> None:
    """Make folders below ``top``, each name made durable in its parent."""
    if folder == top or os.path.isdir(folder):
        return
    _make_folders(os.path.dirname(folder), top)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    _fsync_folder(os.path.dirname(folder))


def _fsync_folder(folder: str) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _umask() -> int:
    mask = os.umask(0o077)  # the only way to read it is to set it
    os.umask(mask)
    return mask


@contextlib.contextmanager
def _locked(path: str, out: str) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; a file system without locks goes without."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    while True:
        file = open(path, "a+")  # noqa: SIM115  held until the end of the run
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise PackError(f"{out!r} is being packed by {holder}. Wait for it, or stop it first") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        # The holder before us may have finished and deleted the file between our open and our lock.
        if os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            break
        file.close()
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with file:
        file.truncate(0)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}")
        file.flush()
        yield


def free_bytes(path: str) -> int:
    """Bytes that this user may still write to the file system of ``path``."""
    return shutil.disk_usage(path).free


@contextlib.contextmanager
def translate_os_errors(path: str) -> Iterator[None]:
    """Turn an OSError while writing to ``path`` into a `PackError` of one line."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PackError):
            raise
        what = error.strerror or str(error)
        if error.errno in _NO_SPACE:
            what += _room(path) + ". Make room and rerun the same command to continue"
        raise PackError(f"cannot write to {path!r}: {what}") from error


def _room(path: str) -> str:
    """What is free, and whether the process may write files of any size: for the message of a failed write."""
    facts = ""
    with contextlib.suppress(OSError):
        facts = f", {free_bytes(path if os.path.isdir(path) else os.path.dirname(path) or '.'):,} bytes free"
    limit = file_size_limit()
    return facts if limit is None else f"{facts}, but a file may have {limit:,} bytes at most (ulimit -f)"


def read_json(path: str) -> object:
    """A JSON file of the work folder, or None where it is missing or cut off."""
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except (FileNotFoundError, ValueError):
        return None
