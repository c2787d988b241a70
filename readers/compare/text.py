"""A `CompareReport` in words: the tables, and which stage is the limit, with the numbers that say so."""

from __future__ import annotations

from typing import Final

from ..page_cache import Dropped
from .report import ArmFigures, CacheTable, CompareReport, Quartiles
from .stages import Stages

__all__ = ["dropped_lines", "memory_line", "report_lines", "table_lines", "verdict_lines"]

_HEADINGS: Final = ("arm", "images/s", "ratio", "first batch, s", "read, ms", "decode, ms", "transform, ms")
#: An arm of which more than this stayed in memory was not measured cold.
_COLD_SHARE: Final = 0.01
#: Below this share of what the stages allow, something else takes the time.
_WELL_USED: Final = 0.6
#: Fewer batches a worker than this, or shorter runs, give rough rates.
_ENOUGH_BATCHES: Final = 4
_ENOUGH_SECONDS: Final = 1.0
#: Our own checks keep one core busy for a while; a load above this share of the cores comes from others too.
_BUSY_SHARE: Final = 0.75


def report_lines(report: CompareReport) -> list[str]:
    """The whole report."""
    lines = [_compared(report), _loaded(report)]
    if report.settings["num_workers"]:
        lines.append(memory_line(report.settings, report.shared_memory))
    for table in report.tables:
        warm = None if table.cache == "warm" else report.tables[0]
        lines += ["", *table_lines(table), *dropped_lines(table), *verdict_lines(table, _processes(report), warm)]
    return lines + _notes(report)


def _compared(report: CompareReport) -> str:
    names = ", ".join(f"{arm['name']} ({arm['kind']})" for arm in report.arms[1:])
    images = report.images
    return (
        f"{report.arms[0]['root']} (files) and {names}: {images['checked']:,} images have the same pixels and labels, "
        f"all {images['measured']:,} measured ones the same bytes ({_mib(images['bytes'])})"
    )


def _loaded(report: CompareReport) -> str:
    settings, images = report.settings, report.images
    workers = settings["num_workers"]
    how = f"{_count(workers, 'worker')} ({settings['start_method']})" if workers else "no workers"
    copying = ", pinned and non_blocking, copying included" if settings["device"] == "cuda" else ""
    return (
        f"{images['measured']:,} of {images['in_set']:,} images in one random order (seed {settings['seed']}), "
        f"batches of {settings['batch_size']:,} to {settings['device']}{copying}, {how}, {settings['transform']}"
    )


def memory_line(settings: dict[str, int], memory: dict[str, int | None]) -> str:
    """What batches on their way from the workers take in shared memory, and whether it is there."""
    needed, free = memory["needed_bytes"] or 0, memory["free_bytes"]
    workers, ahead = settings["num_workers"], settings["prefetch_factor"]
    each = _mib(needed // (workers * ahead))
    line = f"shared memory: {_count(workers, 'worker')} x {_count(ahead, 'batch', 'batches')} x {each} = {_mib(needed)}"
    line += "" if free is None else f", /dev/shm has {_mib(free)} free"
    return line if free is None or needed <= free else line + ": TOO LITTLE. Raise --shm-size, or use fewer workers"


def table_lines(table: CacheTable) -> list[str]:
    """Heading and one row an arm."""
    runs = _count(len(table.files.runs), "run")
    rows = [_HEADINGS, *(_row(table, arm) for arm in table.arms)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    head = f"{table.cache.capitalize()} cache: median (p25-p75) of {runs} an arm, in turns; stages of one image"
    return [head, *("  " + _aligned(row, widths) for row in rows)]


def _row(table: CacheTable, arm: ArmFigures) -> tuple[str, ...]:
    stages = arm.stages
    return (
        arm.name,
        _spread(arm.rate, ",.0f"),
        f"{table.ratio(arm):.2f}",
        _spread(arm.first_batch_seconds, ".2f"),
        *(f"{value:.3f}" for value in (stages.read, stages.decode, stages.transform)),
    )


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
    return "  ".join(cells)


def _spread(value: Quartiles, style: str) -> str:
    return f"{value.median:{style}} ({value.p25:{style}}-{value.p75:{style}})"


def dropped_lines(table: CacheTable) -> list[str]:
    """What left the page cache before the runs, and what stayed; nothing for a warm cache."""
    dropped = [(arm.name, arm.dropped) for arm in table.arms if arm.dropped is not None]
    if not dropped:
        return []
    head = (
        "Dropped from the page cache before each run: the arm's own files. Not dropped: directory entries and inodes, "
        "and what a disk, a server or a hypervisor caches"
    )
    return [head, *(f"  {name}: {_dropped(what)}" for name, what in dropped)]


def _dropped(what: Dropped) -> str:
    line = f"{_count(what.files, 'file')}, {_mib(what.bytes)}, {what.cached_share:.1%} still in memory"
    if what.unknown_files:
        line += f" (not known for {what.unknown_files:,})"
    if what.cached_share > _COLD_SHARE:
        line += " (in use, not yet written, or a file system in memory): NOT COLD"
    return line


def verdict_lines(table: CacheTable, processes: int, warm: CacheTable | None = None) -> list[str]:
    """Whether storage or decoding is the limit, how much shards can change, and what they did.

    Args:
        table: The figures.
        processes: Processes that load at the same time, at most one a core.
        warm: The figures with a warm cache, if ``table`` is not them.
    """
    state = f"{table.cache.capitalize()} cache: "
    lines = [state + (_binding(table.files.stages) if warm is None else _waiting(table.files, warm.files))]
    lines.append(_used(table.files, table.cache, processes))
    return lines + [_outcome(table, arm) for arm in table.arms[1:]]


def _binding(stages: Stages) -> str:
    """The limit by the times of the stages."""
    work = stages.decode + stages.transform
    numbers = f"reading {stages.read:.2f} ms, decoding {stages.decode:.2f} ms, the transform {stages.transform:.2f} ms"
    if stages.read > work:
        said = f"reading binds: {stages.read:.2f} ms"
    else:
        said = f"decoding binds, not storage: with the transform {work:.2f} ms"
    return (
        f"{said} of {stages.total:.2f} ms an image from files ({numbers}). "
        f"Shards change the reading only: at most {stages.total / work:.2f} times the rate"
    )


def _waiting(cold: ArmFigures, warm: ArmFigures) -> str:
    """The limit by what the loader loses without the page cache: with several readers, stages do not show it."""
    share = 1 - cold.rate.median / warm.rate.median
    said = "reading binds" if share > 0.5 else "decoding binds, not storage"
    return (
        f"{said}: files load at {cold.rate.median:,.0f} images/s, at {warm.rate.median:,.0f} with a warm cache, so "
        f"{max(share, 0):.0%} of the time goes into storage; reading an image alone takes {cold.stages.read:.2f} ms, "
        f"decoding and the transform {cold.stages.decode + cold.stages.transform:.2f} ms"
    )


def _used(arm: ArmFigures, cache: str, processes: int) -> str:
    possible = processes * 1000 / arm.stages.total
    share = arm.rate.median / possible
    line = (
        f"At these times {_count(processes, 'process', 'processes')}, one a core, could load {possible:,.0f} images/s; "
        f"measured from files: {arm.rate.median:,.0f} ({share:.0%}), {arm.wait_share.median:.0%} of the time in "
        "waiting for the loader"
    )
    if share < _WELL_USED:
        disk = "several readers at one disk, " if cache == "cold" else ""
        line += f". The rest goes into {disk}handing batches over, or other load on the machine"
    return line


def _outcome(table: CacheTable, arm: ArmFigures) -> str:
    ratio = table.ratio(arm)
    if len(arm.runs) > 1 and arm.rate.overlaps(table.files.rate):
        said = f"no clear difference from files, ratio {ratio:.2f}, within the spread of the runs"
    else:
        said = f"{'faster' if ratio > 1 else 'slower'} than files, ratio {ratio:.2f}"
    said += " (one run, so the spread is not known)" if len(arm.runs) == 1 else ""
    reading = f"reading an image takes {arm.stages.read:.2f} ms instead of {table.files.stages.read:.2f} ms"
    return f"{arm.name}: {said}; {reading}"


def _processes(report: CompareReport) -> int:
    workers: int = report.settings["num_workers"]
    cores: int = report.machine["machine"]["usable_cores"]
    return max(1, min(workers, cores))


def _notes(report: CompareReport) -> list[str]:
    settings, machine = report.settings, report.machine["machine"]
    lines = []
    if machine["load"] is not None and machine["load"] > _BUSY_SHARE * machine["usable_cores"]:
        lines.append(
            f"note: the machine was busy before the first run (load {machine['load']:.1f} on "
            f"{_count(machine['usable_cores'], 'core')}): rates and times are those of a busy machine"
        )
    batches = -(-report.images["measured"] // settings["batch_size"])
    if batches < _ENOUGH_BATCHES * settings["num_workers"]:
        lines.append(
            f"note: {batches:,} batches for {_count(settings['num_workers'], 'worker')} give rough rates. "
            "Use more images, or a smaller --batch-size"
        )
    shortest = min(run.steady_seconds for table in report.tables for arm in table.arms for run in arm.runs)
    if shortest < _ENOUGH_SECONDS:
        lines.append(f"note: runs of {shortest:.2f} s give rough rates. Use more images, or a larger --max-seconds")
    return lines


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
