"""`packer/options.py` and `packer/classes.py`: sizes, shares and class maps, and what is refused."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer import PackOptions, PackUsageError, pack
from packer.classes import labels_for
from packer.options import parse_size

# -- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1e9", 10**9), ("2G", 2 << 30), ("500M", 500 << 20), ("256MiB", 256 << 20), ("500MB", 500 * 10**6), ("1", 1),
        ("1024", 1024), ("64KiB", 64 << 10), ("64k", 64 << 10), ("1.5G", 3 << 29), ("0.5KiB", 512), ("2 GiB", 2 << 30),
        (" 7 ", 7), ("3t", 3 << 40), ("1E6", 10**6), ("1.5e3", 1500), ("10b", 10), ("2gb", 2 * 10**9), ("1.5kb", 1500),
    ],
)  # fmt: skip
def test_case_26_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert PackOptions(shard_size=text).shard_bytes == size


@pytest.mark.parametrize("value", [1, 2**40, 10**18])
def test_whole_numbers_are_sizes(value: int) -> None:
    assert parse_size(value) == value


@pytest.mark.parametrize(("value", "size"), [(1e9, 10**9), (2.0, 2)])
def test_floats_that_are_whole_are_sizes(value: Any, size: int) -> None:
    assert parse_size(value) == size
    assert type(parse_size(value)) is int


@pytest.mark.parametrize(
    "value",
    [
        "0", 0, "-1", -1, "abc", "", " ", "1.5", 2.5, "0.1", "1e-3", "MiB", "1 2", "1,000", "0x10", "1MiBs", "nan",
        float("nan"), float("inf"), True, False, None, b"1", "1e", "e9", ".5G", "5.", "--", "1/2", "5ib", "5i", "inf",
    ],
)  # fmt: skip
def test_case_26_nonsense_sizes_are_usage_errors(value: Any) -> None:
    with pytest.raises(PackUsageError, match="shard-size must be a ") as caught:
        PackOptions(shard_size=value)
    assert repr(value) in str(caught.value)
    assert caught.value.exit_status == 2
    assert isinstance(caught.value, ValueError)


@pytest.mark.timeout(3)
@pytest.mark.parametrize("value", ["1e5000", "1e999999999", "9" * 5000])
def test_sizes_beyond_all_disks_are_usage_errors(value: str) -> None:
    # Python will not print an integer of more than 4,300 digits, and the manifest must.
    with pytest.raises(PackUsageError, match="shard-size"):
        PackOptions(shard_size=value)


@given(number=st.integers(1, 10**6), unit=st.sampled_from(["", "k", "M", "g", "T"]), suffix=st.sampled_from(["", "iB"]))
def test_binary_units(number: int, unit: str, suffix: str) -> None:
    suffix = suffix if unit else ""
    assert parse_size(f"{number}{unit}{suffix}") == number << 10 * " kmgt".index(unit.lower() or " ")


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(PackUsageError):
        assert parse_size(text) >= 1


# -- rejects


@pytest.mark.parametrize(
    ("value", "found", "allowed"),
    [
        ("1%", 1000, 10), ("1%", 99, 0), ("0", 100, 0), (0, 100, 0), ("20", 5, 20), (7, 100, 7), ("100%", 33, 33),
        ("0%", 33, 0), ("0.5%", 1000, 5), ("33.3%", 1000, 333), ("12.5%", 16, 2), ("29%", 100, 29), ("57%", 100, 57),
    ],
)  # fmt: skip
def test_max_rejects(value: Any, found: int, allowed: int) -> None:
    assert PackOptions(max_rejects=value).rejects_allowed(found) == allowed


@pytest.mark.parametrize(
    "value", ["-1", -1, "101%", "1.5", 0.01, "%", "", "abc", "-1%", "1 %", "1e2%", "100.1%", True, None]
)
def test_nonsense_max_rejects_are_usage_errors(value: Any) -> None:
    with pytest.raises(PackUsageError, match="max-rejects must be a count such as 20 or a share such as 1%"):
        PackOptions(max_rejects=value)


@given(share=st.integers(0, 100), found=st.integers(0, 10**9))
def test_a_share_is_exact(share: int, found: int) -> None:
    assert PackOptions(max_rejects=f"{share}%").rejects_allowed(found) == found * share // 100


# -- the others


@pytest.mark.parametrize("name", ["shard_records", "workers", "max_pixels"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_counts_must_be_positive_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(PackUsageError, match=f"{name.replace('_', '-')} must be a whole number, at least 1"):
        PackOptions(**{name: value})


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_shuffle_must_be_a_seed(value: Any) -> None:
    with pytest.raises(PackUsageError, match="shuffle must be a whole number, at least 0"):
        PackOptions(shuffle=value)


@pytest.mark.parametrize("name", ["format", "check", "labels"])
@pytest.mark.parametrize("value", ["", "HDF5", "nope", None, 1])
def test_choices(name: str, value: Any) -> None:
    with pytest.raises(PackUsageError, match=f"{name} must be one of "):
        PackOptions(**{name: value})


def test_options_cannot_be_changed_and_are_keyword_only() -> None:
    options = PackOptions()
    with pytest.raises(AttributeError):
        options.format = "lmdb"  # type: ignore[misc]
    with pytest.raises(TypeError):
        PackOptions("lmdb")  # type: ignore[misc]


def test_the_default_workers_are_the_cores_of_this_process() -> None:
    assert PackOptions().worker_count == len(os.sched_getaffinity(0))
    assert PackOptions(workers=7).worker_count == 7


# -- class maps


def class_file(folder: Path, content: bytes) -> Path:
    """A class map as a text file."""
    path = folder / "classes.txt"
    path.write_bytes(content)
    return path


def test_without_a_map_labels_are_ranks() -> None:
    assert labels_for(["a", "b"], None) == (["a", "b"], {"a": 0, "b": 1})
    assert labels_for(None, None) == (None, {})


@pytest.mark.parametrize("content", [b"b\na\nc\n", b"b\na\nc", b"b\r\na\r\nc\r\n", b"b\na\nc\n\n\n"])
def test_case_76_a_supplied_list_wins(
    tmp_path: Path, make_tree: Callable[..., Path], draw_image: Any, plain_records: Any, content: bytes
) -> None:
    source = make_tree(tmp_path / "s", {"a/1.jpg": draw_image(1), "b/2.jpg": draw_image(2)})
    options = PackOptions(workers=1, class_map=class_file(tmp_path, content))
    report = pack(source, tmp_path / "o", options)
    assert [(r.key, r.label) for r in plain_records(tmp_path / "o")] == [(b"a/1.jpg", 1), (b"b/2.jpg", 0)]
    assert report.classes == 3
    assert any("1 class without images, first 'c'" in warning for warning in report.warnings)


def test_a_packed_set_gives_its_classes(
    tmp_path: Path, make_tree: Callable[..., Path], draw_image: Any, plain_records: Any
) -> None:
    train = make_tree(tmp_path / "train", {f"{name}/1.jpg": draw_image(1) for name in ("x", "y", "z", "\udcff")})
    val = make_tree(tmp_path / "val", {f"{name}/1.jpg": draw_image(2) for name in ("z", "\udcff")})
    pack(train, tmp_path / "o" / "train", PackOptions(workers=1))
    for number, class_map in enumerate((tmp_path / "o" / "train", tmp_path / "o" / "train" / "manifest.json")):
        out = tmp_path / "o" / f"val{number}"
        pack(val, out, PackOptions(workers=1, class_map=class_map))
        assert [(r.key, r.label) for r in plain_records(out)] == [(b"z/1.jpg", 2), (b"\xff/1.jpg", 3)]


def test_class_names_with_separators_of_other_alphabets(tmp_path: Path) -> None:
    # One class a line: only line feeds end a line, not U+2028, form feeds or "next line" characters.
    names = ["a\u2028b", "c\x0cd", "e\x85f", "g\x1ch"]
    path = class_file(tmp_path, "\n".join(names).encode())
    assert labels_for(names, path)[0] == names


def test_class_names_that_are_not_utf_8(tmp_path: Path) -> None:
    path = class_file(tmp_path, b"\xff\n\xc3\xa9\n")
    assert labels_for(["\udcff", "é"], path) == (["\udcff", "é"], {"\udcff": 0, "é": 1})


@pytest.mark.parametrize("content", [b"", b"\n", b"a\n\nb\n", b"a\na\n"])
def test_class_maps_that_say_nothing_clear_are_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(PackUsageError, match="must hold one class name a line, none empty, none twice"):
        labels_for(["a"], class_file(tmp_path, content))


def test_a_folder_that_the_map_does_not_know_is_refused(
    tmp_path: Path, make_tree: Callable[..., Path], draw_image: Any
) -> None:
    source = make_tree(tmp_path / "s", {"a/1.jpg": draw_image(1), "other/1.jpg": draw_image(1)})
    with pytest.raises(PackUsageError, match=r"class 'other' .*is not in the class map"):
        pack(source, tmp_path / "o", PackOptions(workers=1, class_map=class_file(tmp_path, b"a\n")))
    assert not (tmp_path / "o").exists()


def test_maps_that_are_not_there_or_no_maps(tmp_path: Path, make_tree: Callable[..., Path], draw_image: Any) -> None:
    flat = make_tree(tmp_path / "flat", {"1.jpg": draw_image(1)})
    with pytest.raises(PackUsageError, match="cannot be read: No such file"):
        labels_for(["a"], tmp_path / "none.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PackUsageError, match=r"class map: .*not a finished packed set"):
        labels_for(["a"], tmp_path / "empty")
    pack(flat, tmp_path / "o", PackOptions(workers=1))
    with pytest.raises(PackUsageError, match="is a packed set without labels"):
        labels_for(["a"], tmp_path / "o")
    with pytest.raises(PackUsageError, match="the source has no class folders"):
        pack(flat, tmp_path / "p", PackOptions(workers=1, class_map=class_file(tmp_path, b"a\n")))
    with pytest.raises(PackUsageError, match="use one of them"):
        PackOptions(labels="none", class_map=tmp_path / "o")
