"""The operating system's cache of file contents: drop files from it, and see how much of them stayed (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .system import O_READ

__all__ = ["Dropped", "drop_files"]


@dataclass(frozen=True)
class Dropped:
    """What `drop_files` did.

    Attributes:
        files: Files that were asked for.
        bytes: Their size.
        cached_bytes: How much of them is still in memory (whole pages): dirty, mapped or being read by somebody,
            or on a file system that is memory.
        unknown_files: Files that the kernel does not say it about: somebody else's, or without mappings.
    """

    files: int
    bytes: int
    cached_bytes: int
    unknown_files: int

    @property
    def cached_share(self) -> float:
        """``cached_bytes / bytes``, 0 to 1."""
        return min(1.0, self.cached_bytes / self.bytes) if self.bytes else 0.0


def drop_files(paths: Iterable[str | bytes]) -> Dropped:
    """Take files out of the page cache, as far as an unprivileged process can.

    Directory entries and inodes stay, and so does what a disk, a server or a hypervisor has cached.

    Raises:
        OSError: A file cannot be opened.
    """
    files = size = cached = unknown = 0
    for path in paths:
        fd = os.open(path, O_READ)
        try:
            resident = _drop(fd)
            files, size = files + 1, size + os.fstat(fd).st_size
        finally:
            os.close(fd)
        cached, unknown = cached + (resident or 0), unknown + (resident is None)
    return Dropped(files, size, cached, unknown)


def _drop(fd: int) -> int | None:
    with contextlib.suppress(OSError):
        os.fsync(fd)  # dirty pages are kept, so write them first; not every file system can on a reading descriptor
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return _cached_bytes(fd)


def _cached_bytes(fd: int) -> int | None:
    """Bytes of a file in the page cache, in whole pages; None if the kernel does not tell."""
    stat = os.fstat(fd)
    if not stat.st_size:
        return 0
    # For anybody else mincore() calls every page resident: Linux mm/mincore.c, can_do_mincore().
    if os.geteuid() not in (0, stat.st_uid):
        return None
    try:
        view = np.frombuffer(mmap.mmap(fd, stat.st_size, access=mmap.ACCESS_READ), np.uint8)
    except OSError:  # a file system without mappings
        return None
    pages = np.zeros(-(-stat.st_size // mmap.PAGESIZE), np.uint8)
    if _libc().mincore(view.ctypes.data, stat.st_size, pages.ctypes.data):
        return None
    return int((pages & 1).sum()) * mmap.PAGESIZE


def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc
