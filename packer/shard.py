"""The unit of work: one shard of the plan, from its candidates to a published file and a receipt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from readers.layout import FLAGS, FORMAT_CODES, FORMAT_NAMES, MODE_NAMES

from .ingest import Ingest
from .items import Record, Reject
from .publish import OutputFolder, PrivateFile, translate_os_errors
from .workspace import Workspace
from .writers import WRITERS

__all__ = ["ShardJob", "pack_shard"]

#: Called with (files, bytes) as they are done.
Advance = Callable[[int, int], None]
_HASH_READ_BYTES = 1 << 20
_FILES_PER_ADVANCE = 64


@dataclass(frozen=True)
class ShardJob:
    """What every shard of a run has in common; pickled to the workers."""

    source: str
    out: str
    container: str
    check: str
    max_pixels: int | None
    threads: int


def pack_shard(job: ShardJob, number: int, advance: Advance) -> dict[str, Any]:
    """Pack shard ``number``: may be called again after any interruption, with the same bytes as result.

    Returns:
        The receipt: records, bytes, shard_id, blake3, rejects, and counts by kind.

    Raises:
        PackError: The output cannot be written, or the source cannot be read.
    """
    output = OutputFolder(job.out)
    workspace = Workspace(output)
    with translate_os_errors(job.out):
        private = output.private_file()
        try:
            receipt = _write(job, workspace, number, private, advance)
            output.publish_shard(private, number, job.container)
        except BaseException:
            private.discard()
            raise
        workspace.write_receipt(number, receipt)
    return receipt


def _write(job: ShardJob, workspace: Workspace, number: int, private: PrivateFile, advance: Advance) -> dict[str, Any]:
    counts = _Counts()
    rejects: list[Reject] = []
    ingest = Ingest(job.source, job.check, job.max_pixels)
    writer = WRITERS[job.container](private)
    progress = _Progress(advance)
    try:
        with closing(ingest.each(workspace.candidates(number), job.threads)) as items:
            for item in items:
                if isinstance(item, Record):
                    writer.add(item)
                    counts.add(item)
                    progress.add(len(item.image))
                else:
                    rejects.append(item)
                    progress.add(0)
        finished = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    progress.flush()
    file_bytes, file_hash = _hash(private)
    return {
        "records": finished.records,
        "bytes": file_bytes,
        "payload_bytes": finished.payload_bytes,
        "shard_id": finished.shard_id,
        "blake3": file_hash,
        "counts": counts.to_json(),
        "rejects": [reject.to_json() for reject in rejects],
    }


def _hash(private: PrivateFile) -> tuple[int, str]:
    """(size, BLAKE3) of the file; read back in pieces, since mapping it would count as memory."""
    hasher, size, buffer = blake3(), 0, bytearray(_HASH_READ_BYTES)
    with open(private.path, "rb", buffering=0) as file:
        while length := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:length])
            size += length
    return size, hasher.hexdigest()


class _Progress:
    """Hands progress on in lots: a call a file would cost more than it tells."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._files = 0
        self._bytes = 0

    def add(self, size: int) -> None:
        self._files += 1
        self._bytes += size
        if self._files >= _FILES_PER_ADVANCE:
            self.flush()

    def flush(self) -> None:
        self._advance(self._files, self._bytes)
        self._files, self._bytes = 0, 0


class _Counts:
    """What the records of a shard are, by kind."""

    def __init__(self) -> None:
        self._classes: Counter[int] = Counter()
        self._formats: Counter[int] = Counter()
        self._modes: Counter[int] = Counter()
        self._orientations: Counter[int] = Counter()
        self._flags: Counter[int] = Counter()

    def add(self, record: Record) -> None:
        self._classes[record.label] += 1
        self._formats[record.format] += 1
        self._modes[record.mode] += 1
        if record.format != FORMAT_CODES["TIFF"]:  # which Pillow turns upright by itself
            self._orientations[record.orientation] += 1
        self._flags[record.flags] += 1

    def to_json(self) -> dict[str, dict[str, int]]:
        flags = {name: sum(n for bits, n in self._flags.items() if bits & bit) for name, bit in FLAGS.items()}
        return {
            "classes": {str(label): n for label, n in sorted(self._classes.items())},
            "formats": {FORMAT_NAMES.get(code, "unknown"): n for code, n in sorted(self._formats.items())},
            "modes": {MODE_NAMES.get(code, "unknown"): n for code, n in sorted(self._modes.items())},
            "orientations": {str(value): n for value, n in sorted(self._orientations.items()) if value > 1},
            "flags": {name: n for name, n in flags.items() if n},
        }
