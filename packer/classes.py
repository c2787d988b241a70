"""Which label each class folder gets: its rank by name, or what ``--class-map`` says."""

from __future__ import annotations

import os

from readers.errors import ReaderError
from readers.layout import MANIFEST_NAME
from readers.manifest import Manifest

from .errors import PackUsageError

__all__ = ["labels_for"]

_MOST_CHARACTERS = 100_000_000


def labels_for(
    folders: list[str] | None, class_map: str | os.PathLike[str] | None
) -> tuple[list[str] | None, dict[str, int]]:
    """(class names in label order or None, label of each class folder).

    Raises:
        PackUsageError: A folder's name is not in the class map, or the map cannot be used.
    """
    if folders is None:
        if class_map is not None:
            raise PackUsageError("class-map gives labels, but the source has no class folders")
        return None, {}
    names = folders if class_map is None else _mapped_classes(os.fspath(class_map))
    labels = {name: label for label, name in enumerate(names)}
    for folder in folders:
        if folder not in labels:
            raise PackUsageError(
                f"class {folder!r} of the source is not in the class map {os.fspath(class_map or '')!r}. "
                "Add it there, or take the folder out"
            )
    return names, labels


def _mapped_classes(path: str) -> list[str]:
    if os.path.isdir(path) or os.path.basename(path) == MANIFEST_NAME:
        return _classes_of_set(path if os.path.isdir(path) else os.path.dirname(path) or ".")
    if os.path.exists(path) and not os.path.isfile(path):
        raise PackUsageError(f"class map {path!r} is neither a packed set nor a file of class names")
    try:
        # utf-8-sig: some editors begin a file with a byte order mark, which belongs to no name
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            names = file.read(_MOST_CHARACTERS).split("\n")
    except OSError as error:
        raise PackUsageError(f"class map {path!r} cannot be read: {error.strerror}") from error
    while names and not names[-1]:
        names.pop()
    if not names or "" in names or len(set(names)) != len(names):
        raise PackUsageError(f"class map {path!r} must hold one class name a line, none empty, none twice")
    return names


def _classes_of_set(path: str) -> list[str]:
    try:
        classes = Manifest.load(path).classes
    except ReaderError as error:
        raise PackUsageError(f"class map: {error}") from error
    if classes is None:
        raise PackUsageError(f"class map {path!r} is a packed set without labels")
    return list(classes)
