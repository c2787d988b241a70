"""The command that compares files and shards: ``shards compare`` and ``scripts/compare_throughput.py``."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

import click

__all__ = ["compare_command", "main"]

_EPILOG = "Exit status: 0 measured, whatever the ratio; 1 arms differ or a run failed; 2 wrong usage; 130 interrupted."


@click.command(
    "compare",
    epilog=_EPILOG,
    short_help="Compare loading from files with loading from shards.",
    context_settings={"show_default": True, "max_content_width": 110},
)
@click.argument("source", metavar="SOURCE", type=click.Path())
@click.argument("outs", metavar="OUT [OUT ...]", nargs=-1, required=True, type=click.Path())
@click.option("--repeats", default=5, help="Timed runs of each arm; the arms take turns.")
@click.option("--max-seconds", default=10.0, help="Steady seconds after which a run stops, if images are left.")
@click.option("--max-images", default=20_000, help="Images to measure with, drawn from the set; 0: all.")
@click.option("--cold", is_flag=True, help="Measure with the page cache dropped too (Linux).")
@click.option("--num-workers", type=int, help="Worker processes; 0: none.  [default: the usable cores, at most 16]")
@click.option("--batch-size", type=int, help="Images a batch.  [default: 64, less in a small set]")
@click.option("--prefetch-factor", default=2, help="Batches that each worker prepares ahead.")
@click.option("--device", default="auto", help="Where batches go: auto, cpu or cuda; copying is timed too.")
@click.option("--start-method", help="How workers start: fork, spawn or forkserver.  [default: Python's choice]")
@click.option("--timeout", default=120.0, help="Seconds without a batch after which the workers are called hung.")
@click.option("--image-size", default=224, help="Side in pixels of the square that images are resized to.")
@click.option("--exif-transpose", is_flag=True, help="Turn pictures upright by their EXIF orientation, in every arm.")
@click.option("--seed", default=0, help="Decides which images, and their order.")
@click.option("--json", "json_path", metavar="FILE", type=click.Path(), help="Write the result to FILE as JSON too.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def compare_command(
    source: str, outs: tuple[str, ...], json_path: str | None, quiet: bool, timeout: float, **words: Any
) -> None:
    """Load the same images from the folder SOURCE and from each packed set OUT, and compare the rates.

    SOURCE is the folder that OUT was packed from. The arms take turns; each decodes and resizes the same
    images in the same order with the same loader.
    """
    try:
        _compare(source, outs, json_path, quiet, {**words, "timeout_seconds": timeout})
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _compare(source: str, outs: tuple[str, ...], json_path: str | None, quiet: bool, words: dict[str, Any]) -> None:
    # Imported here: --help must not wait for torch.
    from ..errors import ReaderError
    from .options import CompareError, CompareOptions

    try:
        options = CompareOptions(**words)
        _check_json_path(json_path)
        from .run import compare

        report = compare(source, outs, options, notify=None if quiet else _say)
        click.echo("\n".join(report.lines()))
        if json_path is not None:
            _write_json(json_path, {"command": sys.argv, **report.to_dict()})
    except CompareError as error:
        _fail(str(error), error.exit_status)
    except (ReaderError, OSError) as error:
        _fail(str(error), 1)
    except MemoryError:
        _fail("out of memory. Use fewer --num-workers or a smaller --batch-size", 1)
    except ImportError as error:
        _fail(f"{error}. Comparing needs PyTorch: pip install 'shardpack[torch]'", 1)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _check_json_path(path: str | None) -> None:
    """Refuse before minutes are spent, not after."""
    from .options import CompareUsageError

    if path is not None and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
        raise CompareUsageError(f"json: {path!r} cannot be written: give a file in a folder that exists")


def _write_json(path: str, result: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(result, indent=2) + "\n")


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"{click.get_current_context().command_path}: " + " ".join(message.splitlines()), err=True)
    sys.exit(status)


def main() -> None:
    """Entry point of the script."""
    name = os.path.basename(sys.argv[0])
    try:
        compare_command(prog_name=name, standalone_mode=False)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        # One line, like every other error; click would add the usage.
        click.echo(f"{name}: {error.format_message().rstrip('.')}. See `{name} --help`", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo(f"{name}: interrupted", err=True)
        sys.exit(130)
