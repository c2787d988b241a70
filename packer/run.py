"""`pack`: scan -> plan -> shards on an engine -> manifest; resuming, refusing and reporting on the way."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from readers.errors import ReaderError
from readers.layout import CONTAINERS, MANIFEST_NAME, REJECTS_NAME, canonical_json, shard_name
from readers.manifest import Manifest

from .classes import labels_for
from .engines import prepare, refuse_unguarded_script, run_shards
from .errors import PackError, PackUsageError, PlanDiffersError, TooManyRejectsError
from .finished import compare_finished, finished_receipt
from .items import SourceImage
from .options import PackOptions
from .plan import assign_shards
from .progress import Progress
from .publish import OutputFolder, free_bytes, translate_os_errors
from .rejects import RejectLimit
from .report import PackReport, Tallies
from .shard import ShardJob
from .shuffle import shuffled
from .sources.folder import FolderSource, Tally
from .workspace import Plan, Workspace

__all__ = ["pack"]

_SCAN_ADVANCE: Final = 1000
#: What the containers add to an image's bytes, for the check of free space: index row, tree node, rest of a page.
_OVERHEAD_BYTES: Final = {"hdf5": 64, "lmdb": 64 + 4096 + 128}


def pack(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: PackOptions | None = None,
    *,
    quiet: bool = True,
    executor: Executor | None = None,
) -> PackReport:
    """Pack a folder of images into a set of shards.

    Calling it again after an interruption continues; on a finished set it changes nothing.

    Args:
        source: Class folders, or a flat folder of images.
        out: The set to make; a new or empty folder, or one that a run of this has begun.
        options: How to pack.
        quiet: No progress on stderr.
        executor: Runs the shards instead of a pool of ``options.workers`` processes.

    Returns:
        What was found, packed, rejected and passed over.

    Raises:
        PackUsageError: Paths or options do not fit together; nothing was written.
        TooManyRejectsError: More rejects than ``options.max_rejects``; what is done is kept.
        PackError: The run cannot go on; what is done is kept, and the same call continues.
    """
    refuse_unguarded_script()
    run = _Run(os.fspath(source), os.fspath(out), options or PackOptions(), quiet, executor)
    return run()


class _Run:
    """One call of `pack`."""

    def __init__(self, source: str, out: str, options: PackOptions, quiet: bool, executor: Executor | None) -> None:
        self._started = time.monotonic()
        self._options = options
        self._quiet = quiet
        self._executor = executor
        self._out = out
        _check_paths(source, out)
        self._source = FolderSource(source, labels=options.labels, all_files=options.all_files)
        self._classes, self._labels = labels_for(self._source.classes, options.class_map)
        self._output = OutputFolder(out)
        self._workspace = Workspace(self._output)
        self._facts = {**options.content(), "container": options.format, "classes": self._classes}
        self._tally = Tally()

    def __call__(self) -> PackReport:
        self._output.check()
        with self._output.open():
            if self._output.is_finished and not self._options.overwrite:
                try:
                    return self._already_done()
                finally:
                    self._output.finish()
            if self._executor is None and self._options.worker_count > 1:
                prepare()
            try:
                with translate_os_errors(self._out):
                    plan = self._plan()
                    self._check_space(plan)
                    tallies, columns, resumed = self._pack_shards(plan)
                    manifest = self._publish_manifest(plan, tallies, columns)
            except BaseException:
                self._output.clear_temporaries()  # of workers that are dead by now
                raise
            self._output.finish()
        return PackReport.make(
            self._out,
            manifest,
            tallies,
            plan.notes,
            seconds=time.monotonic() - self._started,
            resumed=resumed,
        )

    # -- scan and plan

    def _plan(self) -> Plan:
        stored = self._workspace.stored_plan()
        # Beside a finished set, a plan is left over from a run that was to replace it.
        if stored is None or self._output.is_finished:
            return self._begin()
        try:
            _refuse_other_options(stored.facts, self._facts)
            self._output.clear_temporaries()
            return self._workspace.compare_plan(self._assigned(), stored, self._notes)
        except PlanDiffersError:
            if not self._options.overwrite:
                raise
            return self._begin()

    def _begin(self) -> Plan:
        self._output.clear_work()
        plan = self._workspace.write_plan(self._assigned(), self._facts, self._notes)
        if not plan.found:
            self._output.leave_empty()
            raise PackError(self._why_empty())
        if self._options.overwrite:
            self._output.clear_set()
        return plan

    def _assigned(self) -> Iterator[tuple[int, SourceImage]]:
        options = self._options
        images: Iterator[SourceImage] = self._scanned()
        if options.shuffle is not None:
            images = shuffled(images, options.shuffle, self._output.scratch)
        by_count = options.shard_records is not None
        return assign_shards(
            images, shard_bytes=None if by_count else options.shard_bytes, shard_records=options.shard_records
        )

    def _scanned(self) -> Iterator[SourceImage]:
        with_stat = self._options.shard_records is None
        scan = self._source.scan(self._labels, self._output.scratch, with_stat=with_stat)
        self._tally = scan.tally
        count = 0
        with Progress("scanning", None, quiet=self._quiet) as progress:
            for count, image in enumerate(scan, 1):
                if count % _SCAN_ADVANCE == 0:
                    progress.advance(_SCAN_ADVANCE)
                yield image
            progress.advance(count % _SCAN_ADVANCE)

    def _notes(self) -> dict[str, Any]:
        notes = dict(vars(self._tally))
        for name in ("ignored", "extra"):
            notes[name] = dict(sorted(notes[name].items(), key=lambda item: (-item[1], item[0])))
        return notes

    def _why_empty(self) -> str:
        ignored = sum(self._tally.ignored.values())
        hint = f"; {ignored:,} files have no image extension, --all-files looks at those too" if ignored else ""
        return f"no images found in {self._source.root!r}{hint}. Nothing was written"

    def _check_space(self, plan: Plan) -> None:
        needed = plan.source_bytes + plan.found * _OVERHEAD_BYTES[self._options.format]
        done = sum(
            os.path.getsize(path)
            for number in range(plan.shards)
            if os.path.exists(path := self._output.work_path(shard_name(number, self._options.format)))
        )
        free = free_bytes(self._out)
        if needed - done > free:
            raise PackError(
                f"{self._out!r} needs about {needed - done:,} bytes, {free:,} are free. Make room, or pack elsewhere"
            )

    # -- shards

    def _pack_shards(self, plan: Plan) -> tuple[Tallies, dict[str, list[Any]], int]:
        allowed = self._options.rejects_allowed(plan.found)
        columns: dict[str, list[Any]] = {
            name: [None] * plan.shards for name in ("records", "bytes", "shard_id", "blake3")
        }
        limit = RejectLimit(allowed, plan.found, self._out)

        def keep(number: int, receipt: dict[str, Any]) -> None:
            for name, column in columns.items():
                column[number] = receipt[name]
            limit.count(receipt)

        missing = []
        for number in range(plan.shards):
            receipt = self._finished_receipt(number)
            if receipt is None:
                missing.append(number)
            else:
                keep(number, receipt)
        self._output.drop_strays(set(range(plan.shards)) - set(missing), self._options.format)
        with Progress("packing", plan.found, quiet=self._quiet) as progress:
            progress.advance(sum(n for n in columns["records"] if n is not None))

            def done(number: int, receipt: dict[str, Any]) -> None:
                keep(number, receipt)
                limit.check()

            try:
                limit.check()
                workers = self._options.worker_count
                run_shards(self._job(workers, len(missing)), missing, workers, done, progress.advance, self._executor)
            except TooManyRejectsError:
                self._write_rejects(plan)
                raise
        return self._tallies(plan), columns, plan.shards - len(missing)

    def _job(self, workers: int, shards: int) -> ShardJob:
        options = self._options
        # Fewer shards than workers: the cores left over check images inside each shard.
        threads = max(1, workers // max(1, shards))
        return ShardJob(
            os.path.abspath(self._source.root), os.path.abspath(self._out), options.format, options.check,
            options.max_pixels, threads,
        )  # fmt: skip

    def _finished_receipt(self, number: int) -> dict[str, Any] | None:
        receipt = self._workspace.receipt(number)
        path = self._output.work_path(shard_name(number, self._options.format))
        if receipt is None or not os.path.exists(path) or os.path.getsize(path) != receipt["bytes"]:
            return None
        return receipt

    def _tallies(self, plan: Plan) -> Tallies:
        tallies = Tallies()
        for receipt in self._receipts(plan):
            tallies.add(receipt)
        return tallies

    def _receipts(self, plan: Plan) -> Iterator[dict[str, Any]]:
        for number in range(plan.shards):
            receipt = self._workspace.receipt(number)
            if receipt is not None:
                yield receipt

    # -- the end

    def _write_rejects(self, plan: Plan) -> int:
        lines = [canonical_json(reject) for receipt in self._receipts(plan) for reject in receipt["rejects"]]
        if lines:
            self._output.write(REJECTS_NAME, b"".join(lines), replace=True)
        return len(lines)

    def _publish_manifest(self, plan: Plan, tallies: Tallies, columns: dict[str, list[Any]]) -> Manifest:
        counts = None
        if self._classes is not None:
            counts = tuple(tallies.classes[str(label)] for label in range(len(self._classes)))
        manifest = Manifest(
            container=self._options.format,
            classes=None if self._classes is None else tuple(self._classes),
            class_counts=counts,
            records=sum(columns["records"]),
            rejected=self._write_rejects(plan),
            options=self._options.content(),
            source={"found": plan.found, "bytes": plan.source_bytes, "listing_blake3": plan.listing},
            created_by=f"shardpack {_own_version()}",
            shard_records=tuple(columns["records"]),
            shard_bytes=tuple(columns["bytes"]),
            shard_ids=tuple(columns["shard_id"]),
            shard_blake3s=tuple(columns["blake3"]),
        )
        assert manifest.records + manifest.rejected == plan.found, "a sample was lost or invented"
        self._output.write(MANIFEST_NAME, manifest.to_bytes())
        if Manifest.load(self._out).set_id != manifest.set_id:
            raise PackError(f"{self._out!r} holds another {MANIFEST_NAME}, which somebody put there meanwhile")
        return manifest

    def _already_done(self) -> PackReport:
        try:
            manifest = Manifest.load(self._out)
            manifest.check_files(self._out)
            _refuse_other_options(_stored_facts(manifest), self._facts)
            compare_finished(self._out, manifest, (image for _, image in self._assigned()))
            receipt = finished_receipt(self._out)
        except ReaderError as error:
            raise PackError(f"{error}; or start again with --overwrite") from error
        found = manifest.records + manifest.rejected
        limit = RejectLimit(self._options.rejects_allowed(found), found, self._out)
        limit.count(receipt)
        limit.check()
        tallies = Tallies()
        tallies.add(receipt)
        return PackReport.make(
            self._out, manifest, tallies, self._notes(),
            seconds=time.monotonic() - self._started, resumed=len(manifest.shard_ids), already_done=True,
        )  # fmt: skip


def _check_paths(source: str, out: str) -> None:
    for name, path in (("source", source), ("output", out)):
        if not path:
            raise PackUsageError(f"{name} is empty: give a folder (an unset variable?)")
    real_source, real_out = os.path.realpath(source), os.path.realpath(out)
    if real_out == real_source or real_out.startswith(real_source.rstrip(os.sep) + os.sep):
        raise PackUsageError(
            f"output {out!r} lies in the source {source!r}: it would be packed too. Give another folder"
        )


def _stored_facts(manifest: Manifest) -> dict[str, Any]:
    """`_Run._facts` of a finished set."""
    classes = None if manifest.classes is None else list(manifest.classes)
    return {**manifest.options, "container": manifest.container, "classes": classes}


def _refuse_other_options(stored: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if stored.get(name) != value:
            raise PlanDiffersError(
                f"this set was begun with other options: {name} was {_short(stored.get(name))}, is {_short(value)}. "
                "Use the same options, or start again with --overwrite"
            )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _own_version() -> str:
    try:
        return version("shardpack")
    except PackageNotFoundError:
        return "unknown"


assert set(_OVERHEAD_BYTES) == set(CONTAINERS)
