"""What differs between operating systems: positioned reads, mappings, descriptor limits, cores, terminals."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from typing import Any, Final, TextIO

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["O_READ", "descriptor_limit", "file_size_limit", "map_file", "pread", "printable", "usable_cores"]

#: Flags to open a file for reading; O_BINARY and O_CLOEXEC exist on one side of the fence each.
O_READ: Final = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_DEFAULT_DESCRIPTORS: Final = 256

if hasattr(os, "pread"):
    pread = os.pread
else:  # Windows: one lock, since the file position is shared by all threads
    _seek_lock = threading.Lock()

    def pread(fd: int, length: int, offset: int, /) -> bytes:
        """Read up to ``length`` bytes at ``offset``."""
        with _seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.read(fd, length)


def descriptor_limit() -> int:
    """How many files this process may have open (the soft limit)."""
    if resource is None:
        return _DEFAULT_DESCRIPTORS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _DEFAULT_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def file_size_limit() -> int | None:
    """Bytes that a file of this process may have (the soft limit), or None for any number."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_file(fd: int, offset: int, length: int) -> memoryview:
    """Map ``length`` bytes of a file at ``offset``, read-only and shared.

    The mapping needs no descriptor afterwards where the system allows that (so that 600 mapped indexes
    do not cost 600 descriptors), and ends when the last view of it is gone.
    """
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    lead = offset - start
    return _map(fd, start, lead + length)[lead : lead + length]


def _map(fd: int, start: int, length: int) -> memoryview:
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(fd, length, access=mmap.ACCESS_READ, offset=start, trackfd=False))
    if sys.platform == "linux":
        return _linux_map(fd, start, length)
    return memoryview(mmap.mmap(fd, length, access=mmap.ACCESS_READ, offset=start))


def _linux_map(fd: int, start: int, length: int) -> memoryview:
    # Before Python 3.13 `mmap.mmap` keeps a duplicate of the descriptor; mmap(2) itself needs none.
    libc = _libc()
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    pages = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(pages, libc.munmap, address, length).atexit = False
    return memoryview(pages).cast("B").toreadonly()


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def printable(text: str, stream: TextIO) -> str:
    """Text that a terminal can show: keys need not be UTF-8, nor terminals."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
