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
    first = sorted(islice(iterator, in_memory), key=key)
    if len(first) < in_memory:
        yield from first
        return
    with ExitStack() as stack:
        runs = [_spill(stack, scratch, first)]
        del first
        while run := sorted(islice(iterator, in_memory), key=key):
            runs.append(_spill(stack, scratch, run))
        del run
        while len(runs) > _FAN_IN:
            batch, runs = runs[:_FAN_IN], runs[_FAN_IN:]
            runs.append(_spill(stack, scratch, heapq.merge(*map(_rows, batch), key=key)))
            for file in batch:
                file.close()
        yield from heapq.merge(*map(_rows, runs), key=key)


def _spill(stack: ExitStack, scratch: Scratch, rows: Iterable[Any]) -> IO[bytes]:
    file = stack.enter_context(scratch())
    file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
    return file


def _rows(file: IO[bytes]) -> Iterator[Any]:
    file.seek(0)
    return map(json.loads, file)
