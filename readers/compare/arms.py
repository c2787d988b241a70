"""The arms of a comparison: the same images in the same order, from their files and from packed sets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset

from ..dataset import ShardDataset, Transform
from ..decode import Decoder, make_decoder
from ..errors import UnfinishedSetError
from ..layout import key_to_str
from ..manifest import Manifest
from ..samples import Sample
from .options import CompareError, CompareUsageError

__all__ = ["Arm", "FileSamples", "FilesArm", "SetArm", "SquareTensor", "draw", "make_arms", "open_sets"]

FILES: Final = "files"


class SquareTensor:
    """PIL image -> uint8 tensor ``(3, side, side)``, whatever its size. At module level: it must pickle."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, image: Image.Image) -> torch.Tensor:
        square = np.asarray(image.resize((self.side, self.side), Image.Resampling.BILINEAR))
        # Reordered by numpy: torch does it on all cores, which here costs more than it saves.
        return torch.from_numpy(np.ascontiguousarray(square.transpose(2, 0, 1)))

    def __repr__(self) -> str:
        return f"SquareTensor({self.side})"


class FileSamples(Dataset[Any]):
    """Images read from their own files, as `ShardDataset` reads them from shards.

    Args:
        source: The folder that keys are relative to.
        keys: Which files, in reading order.
        labels: Class id of each, or None in a set without classes.
        decode: As for `ShardDataset`.
        transform: Called with the decoded image.
    """

    def __init__(
        self,
        source: str,
        keys: Sequence[bytes],
        labels: Sequence[int] | None,
        decode: str | Decoder = "pil",
        transform: Transform | None = None,
    ) -> None:
        # Bytes: a key need not be text in this machine's encoding.
        self._folder = os.path.join(os.fsencode(source), b"")
        self._keys = keys
        self._labels = labels
        self._decoder = make_decoder(decode)
        self._transform = transform

    def __len__(self) -> int:
        return len(self._keys)

    def path(self, place: int) -> bytes:
        """The file of the image at ``place`` in the reading order."""
        return self._folder + self._keys[place]

    def __getitem__(self, place: int) -> Any:
        """``Sample(image, label)``, or the image alone in a set without classes.

        Raises:
            CompareError: The file cannot be read or decoded.
        """
        data = self._read(place)
        image = data if self._decoder is None else self._decoded(data, place)
        if self._transform is not None:
            image = self._transform(image)
        return image if self._labels is None else Sample(image, self._labels[place])

    def _read(self, place: int) -> bytes:
        try:
            with open(self.path(place), "rb") as file:
                return file.read()
        except OSError as error:
            raise CompareError(
                f"{key_to_str(self.path(place))}: is in the packed set, but its file cannot be read "
                f"({error.strerror}). Give the SOURCE that was packed, or pack it again"
            ) from error

    def _decoded(self, data: bytes, place: int) -> Any:
        assert self._decoder is not None
        try:
            return self._decoder(data)
        except MemoryError:
            raise
        except Exception as error:
            raise CompareError(
                f"{key_to_str(self.path(place))}: cannot be decoded ({type(error).__name__}: {error})"
            ) from error


@dataclass(frozen=True)
class FilesArm:
    """The image files themselves.

    Attributes:
        root: The folder they lie in.
        keys: Their paths below it, in reading order.
        labels: Class id of each, None without classes.
    """

    root: str
    keys: Sequence[bytes]
    labels: Sequence[int] | None
    name: str = FILES
    kind: str = FILES

    def dataset(self, decode: str | Decoder, transform: Transform | None) -> FileSamples:
        """A new dataset."""
        return FileSamples(self.root, self.keys, self.labels, decode, transform)

    def files(self) -> Iterator[bytes]:
        """Every file that the arm reads from."""
        samples = self.dataset("bytes", None)
        return (samples.path(place) for place in range(len(samples)))


@dataclass(frozen=True)
class SetArm:
    """A packed set.

    Attributes:
        name: The set's folder as the user gave it.
        kind: Its container.
        root: Its folder.
        indices: Places of the images in it, in reading order.
    """

    name: str
    kind: str
    root: str
    indices: Sequence[int]

    def dataset(self, decode: str | Decoder, transform: Transform | None) -> Subset[Any]:
        """A new dataset: no shard is open in it yet, so nothing of an earlier run stays mapped."""
        return Subset(ShardDataset(self.root, transform, decode=decode), self.indices)

    def files(self) -> Iterator[str]:
        """Every file that the arm reads from."""
        manifest = Manifest.load(self.root)
        return (manifest.shard_path(self.root, number) for number in range(len(manifest.shard_ids)))


#: One way to load the images; the place of an image in the reading order is the same in all arms.
Arm: TypeAlias = FilesArm | SetArm


def open_sets(outs: Sequence[str]) -> list[ShardDataset]:
    """The packed sets; all must hold as many images under the same classes.

    Raises:
        CompareUsageError: A folder is no packed set, or is empty.
        CompareError: The sets differ.
    """
    try:
        sets = [ShardDataset(out) for out in outs]
    except UnfinishedSetError as error:
        raise CompareUsageError(str(error)) from error
    first = sets[0]
    if not len(first):
        raise CompareUsageError(f"{outs[0]}: the set is empty, there is nothing to compare")
    for out, other in zip(outs, sets, strict=True):
        if len(other) != len(first):
            raise CompareError(f"{outs[0]} holds {len(first):,} images, {out} {len(other):,}: pack the same source")
        if other.manifest.classes != first.manifest.classes:
            raise CompareError(f"{outs[0]} and {out} have different classes: pack the same source with the same labels")
    return sets


def draw(total: int, most: int, seed: int, *, ends: bool = False) -> list[int]:
    """Sample indices in a random order that follows from ``seed``: all, or ``most`` of them (0: all).

    Args:
        total: Images in the set.
        most: Images to draw.
        seed: Equal seeds draw equal images.
        ends: Put the set's first and last image in front.
    """
    count = min(total, most) if most else total
    drawn: list[int] = np.random.default_rng(seed).choice(total, count, replace=False).tolist()
    return list(dict.fromkeys([0, total - 1, *drawn]))[:count] if ends else drawn


def make_arms(source: str, outs: Sequence[str], sets: Sequence[ShardDataset], indices: Sequence[int]) -> list[Arm]:
    """The arms over the images at ``indices`` of the first set, the files first.

    Only these images' keys are read and kept: a set may hold more paths than memory does.

    Raises:
        CompareError: A set lacks an image that the first one has, or a key cannot be a file of ``source``.
    """
    keys = _keys(sets[0], indices)
    labels = _labels(source, keys, sets[0].manifest.classes)
    arms: list[Arm] = [FilesArm(source, keys, labels)]
    for out, packed in zip(outs, sets, strict=True):
        arms.append(SetArm(out, packed.manifest.container, packed.root, _places(packed, out, indices, keys)))
    return arms


def _keys(packed: ShardDataset, indices: Sequence[int]) -> list[bytes]:
    # Read in the order they lie in the shards: on a disk that is one sweep instead of random seeks.
    found = {index: packed.key(index).encode("utf-8", "surrogateescape") for index in sorted(indices)}
    for key in found.values():
        # Only files below SOURCE: a set from elsewhere must not make us read others.
        if {b"", b".", b".."} & set(key.split(b"/")) or b"\0" in key:
            raise CompareError(f"{packed.root}: key {key_to_str(key)!r} names no file below a folder")
    return [found[index] for index in indices]


def _labels(source: str, keys: Sequence[bytes], classes: Sequence[str] | None) -> list[int] | None:
    """Labels from the class folders, as ImageFolder finds them: not from the set, which is to be checked."""
    if classes is None:
        return None
    ids = {name: label for label, name in enumerate(classes)}
    folders = [key_to_str(key).partition("/")[0] for key in keys]
    unknown = next((folder for folder in folders if folder not in ids), None)
    if unknown is not None:
        raise CompareError(f"{source}: folder {unknown!r} is no class of the packed set")
    return [ids[folder] for folder in folders]


def _places(packed: ShardDataset, out: str, indices: Sequence[int], keys: Sequence[bytes]) -> list[int]:
    """Where a set has the images: the same places as the first one, unless it was packed in another order."""
    return [_place(packed, out, index, key) for index, key in zip(indices, keys, strict=True)]


def _place(packed: ShardDataset, out: str, index: int, key: bytes) -> int:
    if packed.key(index) == key_to_str(key):
        return index
    try:
        return packed.find(key)
    except KeyError:
        raise CompareError(f"{out}: lacks {key_to_str(key)!r}, which the first set has: pack the same source") from None
