"""The ``shards`` command: look after a packed set."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from .compare.cli import compare_command
from .system import printable

__all__ = ["cli", "main"]

_ROOT = click.argument("out", type=click.Path())
_JSON = click.option("--json", "as_json", is_flag=True, help="The result as JSON.")


@click.group(
    context_settings={"show_default": True, "max_content_width": 110},
    epilog="Exit status: 0 good; 1 damaged or failed; 2 wrong usage; 130 interrupted.",
)
@click.version_option(package_name="shardpack")
def cli() -> None:
    """Look after a set of shards that `pack` wrote."""


@cli.command("info")
@_ROOT
@click.option("--duplicates", "find_duplicates", is_flag=True, help="List images that are byte for byte the same.")
@_JSON
def info_command(out: str, find_duplicates: bool, as_json: bool) -> None:
    """What is in the set OUT: counts, sizes, classes, formats, overhead."""
    from .info import duplicates, info, info_lines
    from .layout import counted

    with _errors(out):
        facts = info(out)
        if find_duplicates:
            facts["duplicates"] = duplicates(out)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    lines = info_lines(facts)
    if find_duplicates:
        groups = facts["duplicates"]
        lines += [f"the same image {len(keys)} times: {', '.join(map(repr, keys))}" for keys in groups]
        lines.append(counted(len(groups), "group of duplicates", "groups of duplicates"))
    click.echo(printable("\n".join(lines), sys.stdout))


@cli.command("verify")
@_ROOT
@click.option("--quiet", is_flag=True, help="No progress.")
@_JSON
def verify_command(out: str, quiet: bool, as_json: bool) -> None:
    """Read every byte of the set OUT and compare it with its checksums."""
    from tqdm import tqdm

    from .manifest import Manifest
    from .verify import verify

    with _errors(out):
        total = sum(Manifest.load(out).shard_bytes)
        hidden = quiet or not sys.stderr.isatty()
        with tqdm(total=total, unit="B", unit_scale=True, desc="verifying", file=sys.stderr, disable=hidden) as bar:
            report = verify(out, bar.update)
    text = json.dumps(report.to_dict(), indent=2) if as_json else "\n".join(report.lines())
    click.echo(printable(text, sys.stdout))
    sys.exit(0 if report.ok else 1)


cli.add_command(compare_command)


@contextmanager
def _errors(out: str) -> Iterator[None]:
    """Turn a library error into one line and status 1, or 2 where OUT is no folder: a typo is no damage."""
    from .errors import ReaderError

    try:
        yield
    except (ReaderError, OSError) as error:
        fail(str(error), 1 if os.path.isdir(out) else 2)


def fail(message: str, status: int) -> NoReturn:
    """Print one line on stderr and leave."""
    click.echo(printable("shards: " + " ".join(message.split("\n")), sys.stderr), err=True)
    sys.exit(status)


def main() -> None:
    """Entry point."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
        sys.exit(error.exit_code)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        fail(error.format_message().rstrip(".") + ". See `shards --help`", error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        fail("interrupted", 130)
