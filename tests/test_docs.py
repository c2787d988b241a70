"""The README says what is so: its options are those of the commands, its code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from packer import PackOptions, pack
from packer.cli import command as pack_command
from readers.cli import cli as shards_command
from readers.layout import FLAGS, FORMAT_CODES


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


def documented(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+", text))


def options(command: click.Command) -> set[str]:
    names = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    return names | {"--help"}


def section(readme: str, start: str, end: str) -> str:
    return readme[readme.index(start) : readme.index(end)]


def test_readme_is_short(readme: str) -> None:
    assert len(readme.splitlines()) < 200


def test_every_option_of_pack_is_documented_and_no_other(readme: str) -> None:
    assert documented(section(readme, "| `pack SRC OUT`", "| `shards` |")) == options(pack_command)


@pytest.mark.parametrize("name", ["info", "verify", "compare"])
def test_every_option_of_shards_is_documented_and_no_other(readme: str, name: str) -> None:
    (row,) = re.findall(rf"^\| `shards {name} .*$", readme, re.MULTILINE)
    assert documented(row) | {"--help"} == options(shards_command.commands[name])


def test_codes_of_the_format_are_those_of_the_code(readme: str) -> None:
    for names in (FORMAT_CODES, {name: bit.bit_length() - 1 for name, bit in FLAGS.items()}):
        assert ", ".join(f"{code} {name}" for name, code in names.items()) in " ".join(readme.split())


def test_the_code_in_the_readme_runs(readme: str, tmp_path: Path, image_tree: Callable[..., Path]) -> None:
    image_tree(tmp_path / "photos", classes=3, per_class=4, size=(64, 48))
    for container in ("hdf5", "lmdb"):
        pack(tmp_path / "photos", tmp_path / "shards" / container, PackOptions(format=container))
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        # Under a main guard, as in any script: DataLoader may start its workers by forkserver.
        code = 'if __name__ == "__main__":\n' + "".join(f"    {line}\n" for line in block.splitlines())
        (tmp_path / "snippet.py").write_text(code)
        done = subprocess.run(
            [sys.executable, "snippet.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
