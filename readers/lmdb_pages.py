"""LMDB 0.9 data files, read page by page without the library.

A value lies contiguously in the file, so a reader that knows its place needs neither an environment
(one per file and process, not to be carried over ``fork``), nor a descriptor for each mapping, nor a
memory map that turns a short file into SIGBUS. Layout as in LMDB 0.9's ``mdb.c`` (``MDB_page``,
``MDB_node``, ``MDB_meta``, ``MDB_db``) on 64-bit little-endian machines, the ones this format is for.
Every number read from a page is checked against the file before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

__all__ = ["LmdbFile", "LmdbPageError", "Place"]

_META_MAGIC: Final = 0xBEEFC0DE
_META_VERSION: Final = 1
_BRANCH, _LEAF, _OVERFLOW, _META = 0x01, 0x02, 0x04, 0x08
_BIG: Final = 0x01  # node flag: the value is on overflow pages
_PAGE = struct.Struct("<QHHHH")  # pgno, pad, flags, lower, upper
_NODE = struct.Struct("<HHHH")  # lo, hi, flags, key size
_KEY_SIZE = struct.Struct("<6xH")
_META_HEAD = struct.Struct("<IIQQ")  # magic, version, address, map size
_DB = struct.Struct(
    "<IHHQQQQQ"
)  # pad (page size in the free list's), flags, depth, branch, leaf, overflow, entries, root
_META_TAIL = struct.Struct("<QQ")  # last page, transaction id
_U64 = struct.Struct("<Q")
_NO_PAGE: Final = 2**64 - 1  # the root of an empty database
_MAX_DEPTH: Final = 32
_MIN_PAGE, _MAX_PAGE = 512, 65536


class LmdbPageError(ValueError):
    """The file is no LMDB 0.9 data file, or a page of it is damaged."""


class Place(NamedTuple):
    """Where a value lies: byte offset in the file and length."""

    offset: int
    length: int


_new_place = tuple.__new__


class LmdbFile:
    """The main database of an LMDB data file.

    Args:
        read: ``read(length, offset) -> bytes``, as ``os.pread``.
        file_bytes: The file's size.
    """

    def __init__(self, read: Callable[[int, int], bytes], file_bytes: int) -> None:
        self._read = read
        self._file_bytes = file_bytes
        self.page_bytes = self._page_size()
        if file_bytes < 2 * self.page_bytes:
            raise LmdbPageError("shorter than LMDB's two meta pages")
        self._root = self._newest_root()
        self._cache: dict[int, bytes] = {}

    def find(self, key: bytes) -> Place | None:
        """Place of a key's value, or None."""
        number = self._root
        if number == _NO_PAGE:
            return None
        for _ in range(_MAX_DEPTH):
            page = self._cached_page(number)
            nodes = self._nodes(page)
            if _is_leaf(page):
                return next((self._place(page, number, at, len(key)) for at, k in nodes if k == key), None)
            # The first key of a branch page is empty by construction: it is below every key.
            child = max((i for i, (_, k) in enumerate(nodes) if i == 0 or k <= key), default=0)
            number = _child(page, nodes[child][0])
        raise LmdbPageError("the tree is deeper than LMDB makes it")

    def items(self) -> Iterator[tuple[bytes, Place]]:
        """Every (key, place) in key order; holds one page a level of the tree."""
        self._walked = 0
        if self._root != _NO_PAGE:
            yield from self._walk(self._root, 0)

    def _walk(self, number: int, depth: int) -> Iterator[tuple[bytes, Place]]:
        self._walked += 1
        # Pages that share children would make the walk exponential.
        if depth >= _MAX_DEPTH or self._walked > self._file_bytes // self.page_bytes:
            raise LmdbPageError("the tree is deeper or larger than LMDB makes it")
        page = self._page(number)
        nodes = self._nodes(page)
        if _is_leaf(page):
            for at, key in nodes:
                yield key, self._place(page, number, at, len(key))
            return
        for at, _ in nodes:
            yield from self._walk(_child(page, at), depth + 1)

    def _page_size(self) -> int:
        head = self._read(_PAGE.size + _META_HEAD.size + _DB.size, 0)
        if len(head) < _PAGE.size + _META_HEAD.size + _DB.size:
            raise LmdbPageError("shorter than an LMDB page")
        size: int = _DB.unpack_from(head, _PAGE.size + _META_HEAD.size)[0]
        if not _MIN_PAGE <= size <= _MAX_PAGE or size & (size - 1):
            raise LmdbPageError(f"page size {size} in the first page")
        return size

    def _newest_root(self) -> int:
        metas = [meta for meta in (self._meta(0), self._meta(1)) if meta is not None]
        if not metas:
            raise LmdbPageError("no valid meta page")
        return max(metas)[1]

    def _meta(self, number: int) -> tuple[int, int] | None:
        """(transaction id, root page) of a meta page; None where it is not one."""
        page = self._read(self.page_bytes, number * self.page_bytes)
        if len(page) < self.page_bytes or not _PAGE.unpack_from(page)[2] & _META:
            return None
        magic, version, _, _ = _META_HEAD.unpack_from(page, _PAGE.size)
        if (magic, version) != (_META_MAGIC, _META_VERSION):
            return None
        main = _PAGE.size + _META_HEAD.size + _DB.size
        root: int = _DB.unpack_from(page, main)[7]
        return _META_TAIL.unpack_from(page, main + _DB.size)[1], root

    def _cached_page(self, number: int) -> bytes:
        if number not in self._cache:
            self._cache[number] = self._page(number)
        return self._cache[number]

    def _page(self, number: int) -> bytes:
        if not 2 <= number < self._file_bytes // self.page_bytes:
            raise LmdbPageError(f"page {number} is outside the file")
        page = self._read(self.page_bytes, number * self.page_bytes)
        if len(page) != self.page_bytes:
            raise LmdbPageError(f"page {number} is cut short")
        pgno, _, flags, lower, upper = _PAGE.unpack_from(page)
        if pgno != number or flags & 0x0F not in (_BRANCH, _LEAF):
            raise LmdbPageError(f"page {number} is no tree page")
        if not _PAGE.size <= lower <= upper <= self.page_bytes or lower % 2:
            raise LmdbPageError(f"page {number} is damaged")
        return page

    def _nodes(self, page: bytes) -> list[tuple[int, bytes]]:
        """(byte offset in the page, key) of each node."""
        count = (_PAGE.unpack_from(page)[3] - _PAGE.size) // 2
        starts = struct.unpack_from(f"<{count}H", page, _PAGE.size)
        if not count or max(starts) + _NODE.size > len(page):
            raise LmdbPageError("a tree page without nodes, or with one outside the page")
        key_size = _KEY_SIZE.unpack_from
        return [(at, page[at + _NODE.size : at + _NODE.size + key_size(page, at)[0]]) for at in starts]

    def _place(self, page: bytes, number: int, at: int, key_size: int) -> Place:
        low, high, flags, _ = _NODE.unpack_from(page, at)
        length = low | high << 16
        start = at + _NODE.size + key_size
        if not flags & _BIG:
            offset, limit = number * self.page_bytes + start, (number + 1) * self.page_bytes
        else:
            if start + _U64.size > len(page):
                raise LmdbPageError(f"page {number} is damaged")
            offset, limit = _U64.unpack_from(page, start)[0] * self.page_bytes + _PAGE.size, self._file_bytes
        if offset + length > limit:
            raise LmdbPageError(f"a value of page {number} is outside the file")
        return _new_place(Place, (offset, length))


def _is_leaf(page: bytes) -> bool:
    return bool(_PAGE.unpack_from(page)[2] & _LEAF)


def _child(page: bytes, at: int) -> int:
    low, high, flags, _ = _NODE.unpack_from(page, at)
    number: int = low | high << 16 | flags << 32
    return number
