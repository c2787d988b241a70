"""The `pack` command: exact stderr and status, results on stdout, and no library before it is needed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packer import PackReport, cli

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def source(tmp_path: Path, image_tree: Callable[..., Path]) -> Path:
    """Six images in two classes."""
    return image_tree(tmp_path / "s")


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """``command(*words) -> (status, stdout, stderr)``: the entry point in this process, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pack", *map(str, words)])
        capfd.readouterr()
        status = 0
        try:
            cli.main()
        except SystemExit as leave:
            status = int(leave.code or 0)
        return status, *capfd.readouterr()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


# -- wrong usage: status 2, one line, nothing written

#: None: only that it is one line; what it says is tested beside the code that says it.
WRONG: list[tuple[list[str], str | None]] = [
    ([], "Missing argument 'SRC'. See `pack --help`"),
    (["s"], "Missing argument 'OUT'. See `pack --help`"),
    (["s", "o", "x"], "Got unexpected extra argument (x). See `pack --help`"),
    (["s", "o", "--nope"], "No such option '--nope'. See `pack --help`"),
    (["s", "o", "--format"], "Option '--format' requires an argument. See `pack --help`"),
    (
        ["s", "o", "--format", "zip"],
        "Invalid value for '--format': 'zip' is not one of 'hdf5', 'lmdb'. See `pack --help`",
    ),
    (
        ["s", "o", "--check", "all"],
        "Invalid value for '--check': 'all' is not one of 'decode', 'header', 'none'. See `pack --help`",
    ),
    (
        ["s", "o", "--labels", "yes"],
        "Invalid value for '--labels': 'yes' is not one of 'auto', 'folders', 'none'. See `pack --help`",
    ),
    (["s", "o", "--workers", "two"], "Invalid value for '--workers': 'two' is not a valid integer. See `pack --help`"),
    (["s", "o", "--workers", "0"], "workers must be a whole number, at least 1, got 0"),
    (["s", "o", "--workers", "-3"], "workers must be a whole number, at least 1, got -3"),
    (["s", "o", "--shard-records", "0"], "shard-records must be a whole number, at least 1, got 0"),
    (["s", "o", "--max-pixels", "0"], "max-pixels must be a whole number, at least 1, got 0"),
    (["s", "o", "--shuffle", "-1"], "shuffle must be a whole number, at least 0, got -1"),
    (
        ["s", "o", "--max-rejects", "many"],
        "max-rejects must be a count such as 20 or a share such as 1%, got 'many'",
    ),
    (["none", "o"], "source 'none' does not exist. Give the folder that holds the images"),
    (["s/c0/0000.jpg", "o"], "source 's/c0/0000.jpg' is a file, not a folder. Give the folder that holds the images"),
    (["s", "s/o"], "output 's/o' lies in the source 's': it would be packed too. Give another folder"),
    (["s", "."], None),
    (["s", "file"], "output 'file' is not a folder"),
    (["s", "full"], None),
    (["flat", "o", "--labels", "folders"], "'flat' holds no folders to take labels from"),
    (["s", "o", "--class-map", "none"], "class map 'none' cannot be read: No such file or directory"),
    (["s", "o", "--labels", "none", "--class-map", "file"], None),
]


@pytest.mark.parametrize(
    ("words", "message"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_wrong_usage(
    tmp_path: Path, source: Path, make_tree: Callable[..., Path], command: Any, words: list[str], message: str | None
) -> None:
    make_tree(tmp_path, {"file": b"x", "full/x": b"x", "flat/x.jpg": b"x"})
    before = sorted(map(str, tmp_path.rglob("*")))
    status, stdout, stderr = command(*words)
    assert (status, stdout) == (2, "")
    assert stderr.count("\n") == 1
    assert stderr.startswith("pack: ")
    assert message is None or stderr == f"pack: {message}\n"
    assert sorted(map(str, tmp_path.rglob("*"))) == before


@pytest.mark.parametrize("size", ["abc", "0", "-1", "1.5", "", "5ib", "1e5000"])
def test_case_26_wrong_sizes(source: Path, command: Any, size: str) -> None:
    status, stdout, stderr = command("s", "o", "--shard-size", size)
    assert (status, stdout) == (2, "")
    assert re.fullmatch(r"pack: shard-size must be a .*, got '.*'\n", stderr), stderr


@pytest.mark.parametrize("size", ["1e9", "2G", "500M", "1000000", "64KiB"])
def test_case_26_right_sizes(tmp_path: Path, source: Path, command: Any, size: str) -> None:
    status, _, stderr = command("s", "o", "--shard-size", size, "--workers", 1)
    assert (status, stderr) == (0, "")
    manifest = json.loads((tmp_path / "o/manifest.json").read_bytes())
    assert manifest["options"]["shard_bytes"] == {
        "1e9": 10**9, "2G": 2 << 30, "500M": 500 << 20, "1000000": 10**6, "64KiB": 65536,
    }[size]  # fmt: skip


def test_wrong_usage_as_a_process(tmp_path: Path, run_pack: Run) -> None:
    done = run_pack("nowhere", "o", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pack: source 'nowhere' does not exist. Give the folder that holds the images\n"


# -- failures: status 1


def test_failures_are_one_line(tmp_path: Path, source: Path, make_tree: Callable[..., Path], command: Any) -> None:
    make_tree(tmp_path, {"empty": None, "s/c0/notes.txt": b"x", "texts/c/a.txt": b"x", "texts/c/b.txt": b"x"})
    assert command("empty", "o") == (1, "", "pack: no images found in 'empty'. Nothing was written\n")
    assert command("texts", "o") == (
        1, "", "pack: no images found in 'texts'; 2 files have no image extension, --all-files looks at those too. "
        "Nothing was written\n",
    )  # fmt: skip
    assert command("s", "o", "--workers", 1)[0] == 0
    assert command("s", "o", "--shuffle", 1, "--workers", 1) == (
        1, "", "pack: this set was begun with other options: shuffle was null, is 1. "
        "Use the same options, or start again with --overwrite\n",
    )  # fmt: skip
    (source / "c0/0001.jpg").unlink()
    status, stdout, stderr = command("s", "o", "--workers", 1)
    assert (status, stdout, stderr.count("\n")) == (1, "", 1)
    assert "the source has changed since" in stderr


def test_too_many_rejects(source: Path, command: Any) -> None:
    (source / "c0/bad\n.jpg").write_bytes(b"")
    status, stdout, stderr = command("s", "o", "--workers", 1)
    assert (status, stdout) == (1, "")
    assert stderr == (
        "pack: 1 of 7 images rejected so far, more than the 0 that --max-rejects allows; first 'c0/bad\\n.jpg': "
        "empty (0 bytes). See 'o/rejects.jsonl'; mend the files and start again with --overwrite, or rerun with a "
        "larger --max-rejects to continue\n"
    )
    assert command("s", "o", "--workers", 1, "--max-rejects", 1)[0] == 0


def test_out_of_memory_is_one_line(source: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from packer import run

    def exhausted(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(run, "run_shards", exhausted)
    assert command("s", "o") == (
        1, "", "pack: out of memory. Use fewer --workers; rerun the same command to continue\n",
    )  # fmt: skip


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (cli._TerminatedError, 143)])
def test_interrupts_say_how_to_continue(
    source: Path, command: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], status: int
) -> None:
    from packer import run

    def interrupted(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(run, "run_shards", interrupted)
    found, stdout, stderr = command("s", "o")
    assert (found, stdout) == (status, "")
    assert stderr.strip() == "pack: interrupted; finished shards are kept. Rerun the same command to continue"


# -- results


def test_the_result_is_on_stdout(source: Path, command: Any) -> None:
    (source / "c0/notes.txt").write_bytes(b"")
    status, stdout, stderr = command("s", "o", "--workers", 1)
    assert (status, stderr) == (0, "")
    head, *lines = stdout.splitlines()
    assert re.fullmatch(
        r"o: 6 images, 2 classes, 1 hdf5 shard, 0\.0 MiB \(\d\.\d{3} of the payload\), \d+\.\d s, [\d,]+ images/s", head
    )
    assert lines == [
        "found 6 = packed 6 + rejected 0",
        "formats: JPEG 6; modes: RGB 6",
        "ignored 1 files: .txt 1",
    ]
    assert command("s", "o", "--workers", 1) == (0, "o: already packed: 6 images, 2 classes\n", "")


def test_json_is_the_report(source: Path, command: Any) -> None:
    status, stdout, stderr = command("s", "o", "--json", "--workers", 1, "--format", "lmdb")
    assert (status, stderr) == (0, "")
    result = json.loads(stdout)
    assert set(result) == set(PackReport.__dataclass_fields__)
    assert (result["out"], result["container"], result["packed"], result["classes"]) == ("o", "lmdb", 6, 2)
    again = json.loads(command("s", "o", "--json", "--workers", 1, "--format", "lmdb")[1])
    assert again["already_done"] is True
    assert again["packed"] == 6


def test_quiet_says_nothing_but_errors(source: Path, command: Any) -> None:
    assert command("s", "o", "--quiet", "--workers", 1) == (0, "", "")
    assert command("none", "o", "--quiet")[2] != ""


def test_the_installed_command_and_the_module_are_one(tmp_path: Path, source: Path, file_hashes: Any) -> None:
    installed = Path(sys.executable).with_name("pack")
    if not installed.exists():
        pytest.skip("the command is not installed in this environment")
    for number, start in enumerate(([str(installed)], [sys.executable, "-m", "packer"])):
        subprocess.run([*start, "s", f"o{number}", "--workers", "1"], cwd=tmp_path, check=True, capture_output=True)
    assert file_hashes(tmp_path / "o0") == file_hashes(tmp_path / "o1")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_that_the_terminal_cannot_show(
    tmp_path: Path, make_tree: Callable[..., Path], draw_image: Any, encoding: str
) -> None:
    # The set is complete by then: printing the result must not fail.
    make_tree(tmp_path / "s", {"é/写真.jpg": draw_image(1), "é/\udcff.jpg": draw_image(2), "é/坏.jpg": b""})
    for out in ("写真", "\udcff"):
        done = subprocess.run(
            [sys.executable, "-m", "packer", "s", out, "--workers", "1", "--max-rejects", "1"],
            cwd=tmp_path, capture_output=True, timeout=60, check=False,
            env={**os.environ, "PYTHONIOENCODING": encoding},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        assert b"Traceback" not in done.stderr
        assert b"found 3 = packed 2 + rejected 1" in done.stdout


def test_source_names_in_messages_are_escaped(tmp_path: Path, make_tree: Callable[..., Path], command: Any) -> None:
    make_tree(tmp_path, {"a\nb/train/c/x.jpg": b"", "a\nb/val/c/x.jpg": b""})
    status, _, stderr = command("a\nb", "o")
    assert status == 2
    assert stderr.count("\n") == 1
    assert "'a\\nb'" in stderr


# -- progress


def test_case_97_a_log_has_few_lines_and_no_carriage_returns(tmp_path: Path, source: Path, run_pack: Run) -> None:
    with open(tmp_path / "log", "wb") as log:
        done = run_pack(
            source, tmp_path / "o", "--shard-records", 1, "--workers", 2, stdout=subprocess.PIPE, stderr=log
        )
    assert done.returncode == 0
    data = (tmp_path / "log").read_bytes()
    assert data.count(b"\n") < 50
    assert b"\r" not in data


def test_lines_come_now_and_then_with_rate_and_time_left(
    source: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packer import progress

    monkeypatch.setattr(progress, "_LINE_EVERY_SECONDS", 0.0)
    _, _, stderr = command("s", "o", "--shard-records", 2, "--workers", 1)
    lines = stderr.splitlines()
    assert lines
    assert all(re.match(r"(scanning|packing): \d+( of 6)? images, ", line) for line in lines)
    assert re.fullmatch(r"packing: 6 of 6 images, [\d,]+ images/s, [\d,.]+ MiB/s, about 0 s left", lines[-1])


@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_gets_a_bar(tmp_path: Path, source: Path, quiet: bool) -> None:
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    words = ["s", "o", "--workers", "1", *(["--quiet"] if quiet else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "packer", *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=child,
    )  # fmt: skip
    os.close(child)
    shown = b""
    while True:
        try:
            data = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    stdout, _ = process.communicate(timeout=30)
    os.close(parent)
    assert process.returncode == 0
    if quiet:
        assert (shown, stdout) == (b"", b"")
    else:
        assert b"packing: 100%" in shown
        assert b"6/6" in shown
        assert b"packed 6" in stdout


# -- help and imports


def imported(*words: str, **options: Any) -> set[str]:
    """Top-level modules that a Python process imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "packer", *words], capture_output=True, text=True, check=True,
        timeout=60, **options,
    )  # fmt: skip
    return {
        line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "import time:" in line
    }


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_waits_for_no_library(word: str) -> None:
    modules = imported(word)
    assert "click" in modules
    assert not modules & {"torch", "torchvision", "h5py", "lmdb", "PIL", "numpy", "tqdm", "blake3"}


def test_packing_never_imports_torch(tmp_path: Path, source: Path) -> None:
    modules = imported(str(source), str(tmp_path / "o"), "--workers", "1")
    assert "h5py" in modules
    assert not modules & {"torch", "torchvision", "matplotlib", "simplejpeg"}


def test_help_names_every_option_and_the_statuses(command: Any) -> None:
    status, stdout, stderr = command("--help")
    assert (status, stderr) == (0, "")
    for parameter in cli.command.params:
        assert all(name in stdout for name in parameter.opts if name.startswith("--"))
    for words in ("0 done", "1 failed", "2 wrong usage", "130 or 143", "same command again"):
        assert words in re.sub(r"\s+", " ", stdout)


def test_every_option_of_the_function_is_one_of_the_command() -> None:
    from packer import PackOptions

    chosen = cli.command.make_context("pack", ["s", "o"]).params
    fields = PackOptions.__dataclass_fields__
    assert {name: chosen[name] for name in fields} == {name: field.default for name, field in fields.items()}
    assert set(chosen) - set(fields) == {"source", "out", "quiet", "as_json"}
