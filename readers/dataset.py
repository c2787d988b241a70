"""`ShardDataset`: a packed set as a map-style PyTorch ``Dataset``."""

from __future__ import annotations

import operator
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from .decode import Decoder, make_decoder
from .errors import ReaderError, RecordCorruptError, RecordDecodeError
from .handles import Shard, open_shard
from .layout import counted, key_to_str, order_key, shuffle_key
from .manifest import Manifest
from .samples import KeysAndLabels, Sample, new_sample

__all__ = ["Sample", "ShardDataset"]

_EXTRAS: Final = ("index", "key")
#: Shards a dataset keeps mapped at once: Linux allows 65,530 mappings a process (vm.max_map_count).
_MOST_SHARDS: Final = 16_384
#: Indices a shard from which on reading them together is quicker than one by one.
_WORTH_GROUPING: Final = 8

Transform = Callable[[Any], Any]


_getpid = os.getpid


class ShardDataset(Dataset[Any]):
    """Images and labels of a packed set, in the order of ``torchvision.datasets.ImageFolder``.

    ``dataset[i]`` is ``Sample(image, target)``; in a set packed without classes it is the image alone.
    ``target`` is a class id in ``[0, len(classes))``.

    Args:
        root: The folder that ``pack`` wrote.
        transform: Called with the decoded image.
        target_transform: Called with the class id.
        decode: "pil" (PIL.Image in RGB), "tensor" (uint8 ``(3, H, W)``, RGB), "bytes" (as stored), or a
            callable that gets the stored bytes.
        exif_transpose: Turn pictures upright by their EXIF orientation (ImageFolder does not).
        extras: Any of "index" and "key": appended to the sample, which becomes a plain tuple.
        max_pixels: Refuse to decode larger images; None keeps Pillow's own limit.

    Raises:
        UnfinishedSetError: No finished set is there (also a FileNotFoundError).
        ManifestError: The manifest is damaged or too new (also a ValueError).
        ShardNotFoundError, ShardCorruptError: A shard is missing or of another size than it had.

    Processes: the constructor opens no shard. Shards open on first read in each process, under fork, spawn
    and forkserver alike; a pickle holds the path and the options only. Threads may read at the same time.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        *,
        decode: str | Decoder = "pil",
        exif_transpose: bool = False,
        extras: Iterable[str] = (),
        max_pixels: int | None = None,
    ) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.transform = transform
        self.target_transform = target_transform
        self._decode = decode
        self._exif_transpose = exif_transpose
        self._extras = _checked_extras(extras)
        self._max_pixels = max_pixels
        if max_pixels is not None and (not isinstance(max_pixels, int) or max_pixels < 1):
            raise ValueError(f"max_pixels must be a whole number, at least 1, or None, got {max_pixels!r}")
        self._decoder = make_decoder(decode, exif_transpose=exif_transpose, max_pixels=max_pixels)
        self._manifest: Manifest | None = Manifest.load(self.root)
        self._manifest.check_files(self.root)
        self._set_id = self._manifest.set_id
        self._forget_shards()

    def _forget_shards(self) -> None:
        # The handles first: between the two lines another thread must not take the new pid for theirs.
        self._shards: dict[int, Shard] = {}
        self._pid = os.getpid()

    # -- pickling: the path and the options, whatever has been read so far

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_manifest"] = None
        state["_shards"] = {}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_shards()

    @property
    def manifest(self) -> Manifest:
        """The set's manifest; read again on first use after unpickling."""
        if self._manifest is None:
            manifest = Manifest.load(self.root)
            if manifest.set_id != self._set_id:
                raise ReaderError(f"{self.root}: the set was packed anew while a dataset over it was in use")
            self._manifest = manifest
        return self._manifest

    # -- samples

    def __len__(self) -> int:
        return self.manifest.records

    def __getitem__(self, index: Any) -> Any:
        """The sample at ``index``: an int, a numpy integer or a 0-d tensor; negative counts from the end.

        Raises:
            IndexError: Out of range.
            TypeError: No integer.
            RecordCorruptError: The stored bytes do not match their checksum.
            RecordDecodeError: They do, but are no image; carries ``shard_path``, ``position``, ``key``.
        """
        # Written out, not in steps: for small images as bytes, calls are a good part of the cost.
        manifest = self._manifest or self.manifest
        number = operator.index(index)
        if number < 0:
            number += manifest.records
        if not 0 <= number < manifest.records:
            raise self._out_of_range(index)
        shard_number, position = manifest.locate(number)
        if self._pid != _getpid():
            self._forget_shards()
        shard = self._shards.get(shard_number) or self._open(shard_number)
        try:
            data, label = shard.image(position)
        except RecordCorruptError as error:
            error.add_note(f"sample index {number}")
            raise
        return self._sample(data, label, number, shard, position)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Several samples, visiting each shard once and in the order of its file.

        Args:
            indices: As for ``[]``; any order, repeats allowed.

        Returns:
            One sample an index, in the order asked.

        Raises:
            IndexError: An index is out of range; nothing was read.
        """
        checked = self._checked_array(indices)
        order = checked.argsort(kind="stable")
        ascending = checked[order]
        if len(ascending) < _WORTH_GROUPING * len(self.manifest.shard_ids):
            samples = [self[index] for index in ascending.tolist()]
        else:
            samples = self._grouped(ascending)
        return [samples[rank] for rank in order.argsort().tolist()]

    def _grouped(self, ascending: npt.NDArray[np.int64]) -> list[Any]:
        samples: list[Any] = []
        for number, part, positions in self.manifest.locate_sorted(ascending):
            shard = self._shard(number)
            try:
                images, labels = shard.images(positions)
            except RecordCorruptError as error:
                error.add_note(f"sample index {self.manifest.first_index(number) + error.position}")
                raise
            if self._as_stored:
                samples += map(new_sample, repeat(Sample), zip(images, labels, strict=True))
                continue
            rows = zip(images, labels, ascending[part].tolist(), positions.tolist(), strict=True)
            samples += [self._sample(data, label, index, shard, position) for data, label, index, position in rows]
        return samples

    @property
    def _as_stored(self) -> bool:
        """Samples are the stored bytes and the label, nothing to be done to them."""
        return (
            self._decoder is None
            and self.transform is None
            and self.target_transform is None
            and not self._extras
            and self.manifest.classes is not None
        )

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def _checked(self, index: Any) -> int:
        number = operator.index(index)
        records = self.manifest.records
        if number < 0:
            number += records
        if not 0 <= number < records:
            raise self._out_of_range(index)
        return number

    def _out_of_range(self, index: object) -> IndexError:
        manifest = self.manifest
        return IndexError(
            f"sample index {index} is out of range for {counted(manifest.records, 'sample')} "
            f"({self.root}, {counted(len(manifest.shard_ids), 'shard')})"
        )

    def _checked_array(self, indices: Sequence[Any]) -> npt.NDArray[np.int64]:
        try:
            numbers = np.asarray(indices)
        except ValueError:  # ragged
            numbers = np.zeros(0, object)
        if numbers.dtype != np.int64 or numbers.ndim != 1:
            return np.array([self._checked(index) for index in indices], np.int64)
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            for index in indices:
                self._checked(index)  # raises for the first that is out of range
        return numbers

    def _locate(self, index: int) -> tuple[Shard, int]:
        number, position = self.manifest.locate(index)
        return self._shard(number), position

    def _shard(self, number: int) -> Shard:
        if self._pid != os.getpid():
            self._forget_shards()
        return self._shards.get(number) or self._open(number)

    def _open(self, number: int) -> Shard:
        shard = open_shard(self.root, self.manifest, number)
        while len(self._shards) >= _MOST_SHARDS:
            self._shards.pop(next(iter(self._shards)), None)
        self._shards[number] = shard
        return shard

    def _sample(self, data: bytes, label: int, index: int, shard: Shard, position: int) -> Any:
        image = data if self._decoder is None else self._decoded(data, index, shard, position)
        if self.transform is not None:
            image = self.transform(image)
        if (self._manifest or self.manifest).classes is None:
            return self._with_extras((image,), index, shard, position) if self._extras else image
        target = label if self.target_transform is None else self.target_transform(label)
        if self._extras:
            return self._with_extras((image, target), index, shard, position)
        return new_sample(Sample, (image, target))

    def _decoded(self, data: bytes, index: int, shard: Shard, position: int) -> Any:
        assert self._decoder is not None
        try:
            return self._decoder(data)
        except MemoryError:
            raise
        except Exception as error:
            key = shard.key(position)
            raise RecordDecodeError(
                f"sample {index} (key {key_to_str(key)!r}, record {position} of {shard.path}) cannot be "
                f"decoded: {type(error).__name__}: {error}",
                shard.path, position, key,
            ) from error  # fmt: skip

    def _with_extras(self, sample: tuple[Any, ...], index: int, shard: Shard, position: int) -> tuple[Any, ...]:
        return *sample, *(index if name == "index" else key_to_str(shard.key(position)) for name in self._extras)

    # -- what torchvision's ImageFolder offers

    @property
    def classes(self) -> list[str]:
        """Class names in label order; empty for a set without labels."""
        return list(self.manifest.classes or ())

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class name -> label."""
        return {name: label for label, name in enumerate(self.manifest.classes or ())}

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """Label of every sample, int64 ``(len,)``; reads every shard's index once."""
        parts = [self._column(number, "label") for number in range(len(self.manifest.shard_ids))]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """(key, label) of every sample, read when asked for; nothing is kept in memory."""
        return KeysAndLabels(self.key, self.label, len(self))

    def _column(self, number: int, name: str) -> npt.NDArray[Any]:
        shard, _ = self._locate(self.manifest.first_index(number)) if self.manifest.shard_records[number] else (None, 0)
        return np.zeros(0, np.int64) if shard is None else shard.rows()[name].copy()

    @property
    def yields_pil(self) -> bool:
        """True if samples hold PIL images, which ``default_collate`` cannot put into a batch."""
        return self._decode == "pil" and self.transform is None

    # -- keys

    def key(self, index: Any) -> str:
        """Key of a sample: its file's path below the source folder, "/" separators."""
        shard, position = self._locate(self._checked(index))
        return key_to_str(shard.key(position))

    def label(self, index: Any) -> int:
        """Label of a sample, without reading its image; -1 in a set without classes."""
        shard, position = self._locate(self._checked(index))
        return shard.label(position)

    def find(self, key: str | bytes) -> int:
        """Index of the sample with this key: a binary search, about ``log2(len)`` key reads.

        Raises:
            KeyError: No such sample.
        """
        if not isinstance(key, (str, bytes)):
            raise TypeError(f"a key is text or bytes, got {type(key).__name__}")
        try:
            raw = key if isinstance(key, bytes) else key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise KeyError(f"{key!r} is not in {self.root}: no file can have this name") from None
        rank = self._rank_function()
        wanted = rank(raw)
        index = bisect_left(range(len(self)), wanted, key=lambda i: rank(self._raw_key(i)))
        if index == len(self) or self._raw_key(index) != raw:
            raise KeyError(f"{key_to_str(raw)!r} is not in {self.root}")
        return index

    def _raw_key(self, index: int) -> bytes:
        shard, position = self._locate(index)
        return shard.key(position)

    def _rank_function(self) -> Callable[[bytes], Any]:
        """Records are stored in this order, so it can be searched."""
        seed = self.manifest.options.get("shuffle")
        if seed is not None:
            return lambda raw: (shuffle_key(raw, seed), raw)
        labelled = self.manifest.classes is not None
        return lambda raw: order_key(raw, labelled=labelled)

    def __repr__(self) -> str:
        manifest = self.manifest
        shards = counted(len(manifest.shard_ids), f"{manifest.container} shard")
        lines = [
            f"{type(self).__name__} {self.root}",
            f"    {counted(manifest.records, 'sample')} in {shards}",
            f"    classes: {len(manifest.classes)}" if manifest.classes is not None else "    no labels",
            f"    decode: {self._decode if isinstance(self._decode, str) else repr(self._decode)}",
        ]
        lines += [f"    transform: {self.transform!r}"] if self.transform is not None else []
        return "\n".join(lines)


def _checked_extras(extras: Iterable[str]) -> tuple[str, ...]:
    if isinstance(extras, str):
        raise ValueError(f"extras may hold index and key, got the text {extras!r}: give a list of names")
    names = tuple(extras)
    for name in names:
        if name not in _EXTRAS:
            raise ValueError(f"extras may hold {' and '.join(_EXTRAS)}, got {name!r}")
    return names
