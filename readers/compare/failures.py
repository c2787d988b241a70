"""What a failing DataLoader means, in one line that says what to do."""

from __future__ import annotations

import re
from typing import Final

from ..errors import ReaderError

__all__ = ["explain", "without_traceback"]

_SHARED_MEMORY: Final = (
    "shared memory (/dev/shm) is full: the workers hand batches over in it. Start the container with a larger one "
    "(docker run --shm-size=1g), or use fewer --num-workers, a smaller --batch-size or --prefetch-factor"
)
#: Part of a message from torch -> what it means; the first that fits.
_HINTS: Final = (
    ("Bus error", _SHARED_MEMORY),
    ("unable to write to file </torch_", _SHARED_MEMORY),
    ("unable to mmap", _SHARED_MEMORY),
    ("unable to open shared memory", _SHARED_MEMORY),
    ("No space left on device", _SHARED_MEMORY),
    ("ancdata", "too many open files: raise the limit (ulimit -n), or use fewer --num-workers"),
    ("Too many open files", "too many open files: raise the limit (ulimit -n), or use fewer --num-workers"),
    (
        "DataLoader timed out",
        "the workers hang, or storage is that slow: try --start-method spawn (a lock may have been held when they "
        "were forked), or a longer --timeout",
    ),
    ("signal: Killed", "a worker was killed, most likely for memory: use fewer --num-workers"),
    ("exited unexpectedly", "a worker ended without a word: try --num-workers 0 to see the error itself"),
    ("pickle", "the transform cannot be sent to workers: define it at the top level of a module"),
)


def explain(error: BaseException) -> str:
    """An error of a loader or its workers in one line, with what to do about it where that is known."""
    text = without_traceback(error)
    if isinstance(error, ReaderError):  # ours are whole sentences that end in what to do
        return text
    hint = next((hint for part, hint in _HINTS if part in text), None)
    text = f"{type(error).__name__}: {text}"
    return text if hint is None else f"{hint} ({text})"


def without_traceback(error: BaseException) -> str:
    """An error's own message in one line, also if it comes from a worker.

    DataLoader raises a worker's error again with the worker's traceback as its text; the last line there that
    begins with the error's type is what was said.
    """
    text = str(error)
    caught = re.match(r"Caught (\w+) in ", text)
    if caught is not None:
        said = re.findall(rf"^(?:\w+\.)*{caught[1]}: (.*)$", text, re.MULTILINE)
        text = said[-1] if said else caught[1]
    return " ".join(text.split())
