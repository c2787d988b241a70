"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, Self

from tqdm import tqdm

__all__ = ["Progress"]

_LINE_EVERY_SECONDS: Final = 30.0


class Progress:
    """Counts files and bytes of one stage.

    Args:
        stage: What is being done, for people.
        total: Files in all, or None where that is not known yet.
        quiet: Show nothing.
    """

    def __init__(self, stage: str, total: int | None, *, quiet: bool) -> None:
        self._stage = stage
        self._total = total
        self._files = 0
        self._bytes = 0
        self._started = self._last_line = time.monotonic()
        terminal = sys.stderr.isatty()
        self._lines = not quiet and not terminal
        self._bar = None if quiet or not terminal else tqdm(total=total, desc=stage, unit=" images", file=sys.stderr)

    def advance(self, files: int, size: int = 0) -> None:
        """Count some more files and bytes."""
        self._files += files
        self._bytes += size
        if self._bar is not None:
            self._bar.update(files)
            if size:
                self._bar.set_postfix_str(f"{self._rate():.1f} MiB/s", refresh=False)
        elif self._lines and time.monotonic() - self._last_line >= _LINE_EVERY_SECONDS:
            self._line()

    def _rate(self) -> float:
        return self._bytes / 2**20 / max(time.monotonic() - self._started, 1e-9)

    def _line(self) -> None:
        self._last_line = time.monotonic()
        elapsed = max(self._last_line - self._started, 1e-9)
        of = f" of {self._total:,}" if self._total is not None else ""
        rate = f"{self._files / elapsed:,.0f} images/s" + (f", {self._rate():.1f} MiB/s" if self._bytes else "")
        left = ""
        if self._total and self._files:
            left = f", about {(self._total - self._files) * elapsed / self._files:,.0f} s left"
        sys.stderr.write(f"{self._stage}: {self._files:,}{of} images, {rate}{left}\n")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
