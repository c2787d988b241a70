"""The ``pack`` command: words -> `PackOptions`; errors -> message and exit status."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any, NoReturn

import click

from readers.system import printable

__all__ = ["main"]

_EPILOG = (
    "Exit status: 0 done; 1 failed; 2 wrong usage; 130 or 143 interrupted. "
    "Running the same command again continues an interrupted one."
)


@click.command(epilog=_EPILOG, context_settings={"show_default": True, "max_content_width": 110})
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("out", metavar="OUT", type=click.Path())
@click.option("--format", default="hdf5", type=click.Choice(["hdf5", "lmdb"]), help="Container of the shards.")
@click.option("--shard-size", default="256MiB", help="Bytes a shard: 256MiB, 2G, 1e9.")
@click.option("--shard-records", type=int, help="Images a shard, instead of --shard-size; scans without `stat`.")
@click.option("--workers", type=int, help="Processes that pack.  [default: the cores this process may use]")
@click.option(
    "--check",
    default="decode",
    type=click.Choice(["decode", "header", "none"]),
    help="Prove each image by decoding it, open it only, or look at its first bytes.",
)
@click.option("--max-rejects", default="1%", help="Fail past this many bad files: a count or a share.")
@click.option("--max-pixels", type=int, help="Reject larger images.  [default: Pillow's limit, 178956970]")
@click.option("--class-map", type=click.Path(), help="A packed set, or a file with one class a line: labels follow it.")
@click.option("--shuffle", type=int, metavar="SEED", help="Store in a seeded random order, for slow disks.")
@click.option(
    "--labels",
    default="auto",
    type=click.Choice(["auto", "folders", "none"]),
    help="Labels from the first folder level, or none; auto: from folders if there are any.",
)
@click.option("--all-files", is_flag=True, help="Look at files without an image extension too.")
@click.option("--overwrite", is_flag=True, help="Start again, even over a packed set.")
@click.option("--quiet", is_flag=True, help="No progress and no result, errors only.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
@click.version_option(package_name="shardpack")
def command(source: str, out: str, quiet: bool, as_json: bool, **words: Any) -> None:
    """Pack the images below SRC into a few large shards in OUT.

    SRC holds one folder a class, or images without labels. Images are stored byte for byte.
    """
    # Imported here: --help must not wait for libraries.
    from .errors import PackError
    from .options import PackOptions
    from .run import pack

    try:
        report = pack(source, out, PackOptions(**words), quiet=quiet)
    except PackError as error:
        _fail(str(error), error.exit_status)
    except MemoryError:
        _fail("out of memory. Use fewer --workers; rerun the same command to continue", 1)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    elif not quiet:
        click.echo(printable("\n".join(report.lines()), sys.stdout))


def _fail(message: str, status: int) -> NoReturn:
    click.echo(printable("pack: " + " ".join(message.split("\n")), sys.stderr), err=True)
    sys.exit(status)


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM, raised where Ctrl-C would be."""


def _on_sigterm(signum: int, frame: object) -> NoReturn:
    raise _TerminatedError


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        command(standalone_mode=False)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        # One line, like every other error; click would add the usage.
        _fail(error.format_message().rstrip(".") + ". See `pack --help`", error.exit_code)
    except (KeyboardInterrupt, click.Abort) as error:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        terminated = isinstance(error, _TerminatedError) or isinstance(error.__cause__, _TerminatedError)
        _fail(
            "interrupted; finished shards are kept. Rerun the same command to continue",
            143 if terminated else 130,
        )
