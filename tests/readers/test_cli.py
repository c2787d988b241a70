"""The ``shards`` command: words, messages, exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run_shards(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "readers", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify",), "shards: Missing argument 'OUT'. See `shards --help`\n"),
        (("info", "x", "y"), "shards: Got unexpected extra argument (y). See `shards --help`\n"),
        (("polish",), "shards: No such command 'polish'. See `shards --help`\n"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(words: tuple[str, ...], message: str) -> None:
    done = run_shards(*words)
    assert (done.returncode, done.stderr, done.stdout) == (2, message, "")


def test_no_words_print_the_help() -> None:
    done = run_shards()
    assert done.returncode == 2
    assert "verify" in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["info", "verify"])
def test_no_packed_set_is_one_line_and_status_1(command: str, tmp_path: Path) -> None:
    done = run_shards(command, str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        f"shards: {tmp_path}: no manifest.json here, so this is not a finished packed set. "
        "Give the folder that `pack` wrote\n"
    )


def test_help_waits_for_no_library() -> None:
    code = (
        "import sys; sys.argv = ['shards', '--help']\n"
        "from readers.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'h5py', 'lmdb', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
