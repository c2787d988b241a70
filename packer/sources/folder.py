"""A tree of image files: class folders, or one flat collection.

Samples come in the order of ``torchvision.datasets.ImageFolder``, one folder listing at a time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from readers.layout import NO_LABEL

from ..errors import PackError, PackUsageError
from ..external_sort import Scratch, external_sort
from ..items import UNKNOWN, SourceImage

__all__ = ["FolderSource", "Tally"]

#: Names that image files have; torchvision's list is the shorter `_IMAGEFOLDER_EXTENSIONS`.
IMAGE_EXTENSIONS: Final = frozenset(
    [
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".mpo",
        ".png",
        ".apng",
        ".webp",
        ".gif",
        ".bmp",
        ".dib",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
        ".pfm",
        ".jp2",
        ".j2k",
        ".jpf",
        ".jpx",
        ".j2c",
        ".jpc",
        ".avif",
        ".avifs",
    ]
)
_IMAGEFOLDER_EXTENSIONS: Final = frozenset([".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"])

#: What file managers, archivers and NAS boxes leave behind; compared in lower case.
_SYSTEM_NAMES: Final = frozenset(
    ("__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "@eadir", "lost+found",
     "$recycle.bin", "system volume information")
)  # fmt: skip
_TRAIN_NAMES: Final = ("train", "training")
_HELD_OUT_NAMES: Final = ("val", "valid", "validation", "test", "testing")
#: Names sorted in memory at once; a folder with more is sorted through scratch files.
_NAMES_IN_MEMORY: Final = 50_000


@dataclass
class Tally:
    """What a scan passed over, by kind.

    Attributes:
        hidden: Hidden and system files and folders, each folder once.
        hidden_images: Those among them that ImageFolder may take: folders, and files named like images.
        ignored: Files without an image extension, by extension.
        outside: Image files beside the class folders.
        loops: Folders not entered because a link made them their own ancestor, at most ten of them.
        extra: Files that ImageFolder would not have taken, by extension.
    """

    hidden: int = 0
    hidden_images: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    outside: int = 0
    loops: list[str] = field(default_factory=list)
    extra: Counter[str] = field(default_factory=Counter)


class FolderSource:
    """A folder tree as a source of samples.

    Args:
        root: The folder.
        labels: "folders", "none" or "auto" (see `PackOptions.labels`).
        all_files: Take files without an image extension too.

    Raises:
        PackUsageError: Not a folder, or a folder of splits rather than of classes.
        PackError: It cannot be listed.
    """

    def __init__(self, root: str, *, labels: str = "auto", all_files: bool = False) -> None:
        self.root = root
        self._all_files = all_files
        folders = self._class_folders()
        self.labelled = labels == "folders" or (labels == "auto" and bool(folders))
        if self.labelled:
            self._refuse_splits(folders)
        if labels == "folders" and not folders:
            raise PackUsageError(f"{root!r} holds no folders to take labels from")
        #: Class folders in ImageFolder's order, None without labels.
        self.classes = sorted(folders) if self.labelled else None

    def _class_folders(self) -> list[str]:
        if not os.path.isdir(self.root):
            what = "is a file, not a folder" if os.path.exists(self.root) else "does not exist"
            raise PackUsageError(f"source {self.root!r} {what}. Give the folder that holds the images")
        with _listing(self.root) as entries:
            return [entry.name for entry in entries if not _is_hidden(entry.name) and _is_folder(entry)]

    def _refuse_splits(self, folders: list[str]) -> None:
        """Stop before ``train`` and ``val`` become two classes."""
        train = next((name for name in _TRAIN_NAMES if name in folders), None)
        held_out = next((name for name in _HELD_OUT_NAMES if name in folders), None)
        if train is None or held_out is None:
            return
        if self._folders_of(train) & self._folders_of(held_out):
            source = self.root.rstrip(os.sep)
            raise PackUsageError(
                f"{self.root!r} holds {train}/ and {held_out}/ with the same class folders inside: these are two "
                f"sets, not two classes. Pack each: `pack {source}/{train} OUT/{train}` and "
                f"`pack {source}/{held_out} OUT/{held_out} --class-map OUT/{train}`"
            )

    def _folders_of(self, name: str) -> set[str]:
        with _listing(os.path.join(self.root, name)) as entries:
            return {entry.name for entry in entries if not _is_hidden(entry.name) and _is_folder(entry)}

    def scan(self, class_to_label: dict[str, int], scratch: Scratch, *, with_stat: bool = True) -> _Scan:
        """A pass over the tree: iterate it once, then read its ``tally``.

        Args:
            class_to_label: Label of each class folder; empty without labels.
            scratch: Opens temporary files, for folders too large to sort in memory.
            with_stat: Look up sizes and times.
        """
        return _Scan(self, class_to_label, scratch, with_stat, self._all_files)


class _Scan:
    """One pass over a `FolderSource`."""

    def __init__(
        self,
        source: FolderSource,
        class_to_label: dict[str, int],
        scratch: Scratch,
        with_stat: bool,
        all_files: bool,
    ) -> None:
        self.tally = Tally()
        self._source = source
        self._class_to_label = class_to_label
        self._scratch = scratch
        self._with_stat = with_stat
        self._all_files = all_files

    def __iter__(self) -> Iterator[SourceImage]:
        if self._source.classes is None:
            yield from self._tree("", NO_LABEL)
            return
        self._tally_outside()
        for name in self._source.classes:
            yield from self._tree(name, self._class_to_label[name])

    def _tally_outside(self) -> None:
        with _listing(self._source.root) as entries:
            for entry in entries:
                if _is_hidden(entry.name):
                    self._tally_hidden(entry, counts=_is_folder(entry))
                elif not _is_folder(entry) and self._is_candidate(entry.name):
                    self.tally.outside += 1

    def _tree(self, folder: str, label: int) -> Iterator[SourceImage]:
        """A folder and all below it, in the order of ``sorted(os.walk(folder))``."""
        above = ("",) if folder else ()
        if folder and self._is_loop(folder, above):
            return
        folders: list[str] = []
        yield from self._files(folder, label, folders)
        yield from self._below(folder, label, folders, above)

    def _below(self, folder: str, label: int, folders: list[str], ancestors: tuple[str, ...]) -> Iterator[SourceImage]:
        """All below a folder, whose sub-folders are given.

        ``sorted(os.walk(...))`` compares whole paths as text: "a", "a-b", "a-b/x", "a/b". So a folder's own
        files and what lies below it are two events, and siblings such as "a-b" may come between them.
        """
        prefix = folder + "/" if folder else ""
        inside: dict[str, list[str]] = {}
        for event in sorted([*folders, *(name + "/" for name in folders)]):
            name = event.rstrip("/")
            if event != name:
                found = inside.pop(name)
                if found:
                    yield from self._below(prefix + name, label, found, (*ancestors, folder))
            elif self._is_loop(prefix + name, (*ancestors, folder)):
                inside[name] = []
            else:
                yield from self._files(prefix + name, label, inside.setdefault(name, []))

    def _is_loop(self, folder: str, ancestors: tuple[str, ...]) -> bool:
        path = self._path(folder)
        if not os.path.islink(path) or not any(_same_folder(path, self._path(name)) for name in ancestors):
            return False
        self.tally.loops = [*self.tally.loops, folder][:10]
        return True

    def _files(self, folder: str, label: int, folders: list[str]) -> Iterator[SourceImage]:
        """The candidates directly in a folder, by name; appends its sub-folders to ``folders``."""
        prefix = folder + "/" if folder else ""
        path = self._path(folder)
        names = external_sort(self._names(path, folders), self._scratch, in_memory=_NAMES_IN_MEMORY)
        for name in names:
            size, mtime_ns = _stat(f"{path}/{name}") if self._with_stat else (UNKNOWN, UNKNOWN)
            yield SourceImage(os.fsencode(prefix + name), label, size, mtime_ns)

    def _names(self, path: str, folders: list[str]) -> Iterator[str]:
        with _listing(path) as entries:
            for entry in entries:
                if _is_hidden(entry.name):
                    self._tally_hidden(entry, counts=_is_folder(entry) or _imagefolder_takes(entry.name))
                elif _is_folder(entry):
                    folders.append(entry.name)
                elif self._is_candidate(entry.name):
                    yield entry.name

    def _tally_hidden(self, entry: os.DirEntry[str], *, counts: bool) -> None:
        self.tally.hidden += 1
        self.tally.hidden_images += counts

    def _is_candidate(self, name: str) -> bool:
        extension = _extension(name)
        taken = self._all_files or extension in IMAGE_EXTENSIONS
        if not taken:
            self.tally.ignored[extension or "(none)"] += 1
        elif extension not in _IMAGEFOLDER_EXTENSIONS:
            self.tally.extra[extension or "(none)"] += 1
        return taken

    def _path(self, folder: str) -> str:
        return os.path.join(self._source.root, *folder.split("/")) if folder else self._source.root


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _SYSTEM_NAMES


def _imagefolder_takes(name: str) -> bool:
    return _extension(name) in _IMAGEFOLDER_EXTENSIONS


def _extension(name: str) -> str:
    """As ``os.path.splitext(name)[1].lower()``, in a quarter of the time: it runs for every file."""
    stem, dot, extension = name.rpartition(".")
    return dot + extension.lower() if stem else ""


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself; reading it will say so
        return False


def _same_folder(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _stat(path: str) -> tuple[int, int]:
    """(size, mtime_ns); zeros for what cannot be looked up, which reading it will explain."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _listing(path: str) -> os._ScandirIterator[str]:
    try:
        return os.scandir(path)
    except OSError as error:
        raise PackError(
            f"cannot list folder {path!r}: {error.strerror}. Nothing in it could be packed, so nothing was; "
            "make it readable or take it out of the source"
        ) from error
