"""Sort more rows than memory should hold: sorted runs in scratch files, then a merge."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import IO, Any, Final, TypeVar

__all__ = ["Scratch", "external_sort"]

#: Opens a nameless temporary file, binary, for writing and reading.
Scratch = Callable[[], IO[bytes]]
Row = TypeVar("Row", str, list[Any])

#: Runs merged at once: each holds a descriptor, and some systems allow 256.
_FAN_IN: Final = 64


def external_sort(
    rows: Iterable[Row],
    scratch: Scratch,
    *,
    key: Callable[[Row], Any] | None = None,
    in_memory: int = 100_000,
) -> Iterator[Row]:
    """Yield ``rows`` sorted by ``key``.

    Args:
        rows: Strings, or lists of strings and numbers (what JSON carries unchanged).
        scratch: Opens a temporary file.
        key: As for ``sorted``.
        in_memory: Rows held at once; no file is opened for as many or fewer.
    """
    iterator = iter(rows)
    run = sorted(islice(iterator, in_memory + 1), key=key)
    if len(run) <= in_memory:
        yield from run
        return
    with ExitStack() as stack:
        levels: list[list[IO[bytes]]] = []
        while run:
            _keep(levels, 0, _spill(stack, scratch, run), stack, scratch, key)
            run = sorted(islice(iterator, in_memory), key=key)
        yield from heapq.merge(*(_rows(file) for level in levels for file in level), key=key)


def _keep(
    levels: list[list[IO[bytes]]], height: int, run: IO[bytes], stack: ExitStack, scratch: Scratch, key: Any
) -> None:
    """Add a run to its level; a full level becomes one run of the next, so that few files are open at once."""
    if height == len(levels):
        levels.append([])
    levels[height].append(run)
    if len(levels[height]) == _FAN_IN:
        full, levels[height] = levels[height], []
        merged = _spill(stack, scratch, heapq.merge(*map(_rows, full), key=key))
        for file in full:
            file.close()
        _keep(levels, height + 1, merged, stack, scratch, key)


def _spill(stack: ExitStack, scratch: Scratch, rows: Iterable[Any]) -> IO[bytes]:
    file = stack.enter_context(scratch())
    file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
    return file


def _rows(file: IO[bytes]) -> Iterator[Any]:
    file.seek(0)
    return map(json.loads, file)
