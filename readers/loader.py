"""`shard_loader`: a stock ``DataLoader`` with the settings that work."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, default_collate

from .dataset import ShardDataset
from .system import usable_cores

__all__ = ["collate", "shard_loader"]

_MOST_WORKERS: Final = 16


def shard_loader(
    dataset: Dataset[Any],
    batch_size: int | None = 1,
    *,
    shuffle: bool = False,
    num_workers: int | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """A ``torch.utils.data.DataLoader`` over a packed set.

    Defaults, each of which its DataLoader name overrides: workers for the cores this process may use (at
    most 16), kept between epochs; memory pinned where there is an accelerator; a `DistributedSampler` when
    a process group exists (call ``loader.sampler.set_epoch(epoch)`` before each epoch, as always with it).

    Args:
        dataset: A `ShardDataset`, a ``Subset`` of one, or any map-style dataset.
        batch_size: Samples a batch.
        shuffle: A new random order each epoch.
        num_workers: Worker processes; 0 reads in this process.
        options: Anything else that DataLoader takes.

    Raises:
        TypeError: Samples would be PIL images, which do not collate; the message says what to add.
    """
    batched = batch_size is not None or "batch_sampler" in options
    if "collate_fn" not in options and batched:
        _check_collates(dataset)
        options["collate_fn"] = collate
    workers = min(_MOST_WORKERS, usable_cores()) if num_workers is None else num_workers
    options.setdefault("pin_memory", torch.cuda.is_available())
    if workers > 0:
        options.setdefault("persistent_workers", True)
    else:  # DataLoader refuses these without workers; a debugging run with 0 must not fail over them
        for name in ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context"):
            options.pop(name, None)
    if "sampler" not in options and "batch_sampler" not in options and _in_process_group():
        options["sampler"] = DistributedSampler(dataset, shuffle=shuffle)
    elif shuffle:
        options["shuffle"] = True
    if "batch_sampler" in options:
        return DataLoader(dataset, num_workers=workers, **options)
    return DataLoader(dataset, batch_size=batch_size, num_workers=workers, **options)


def collate(samples: list[Any]) -> Any:
    """``default_collate``, with an error that says which sizes met when a batch mixes sizes."""
    try:
        return default_collate(samples)
    except RuntimeError as error:
        shapes = [tuple(getattr(_image(sample), "shape", ())) for sample in samples]
        if len(set(shapes)) < 2:
            raise
        other = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
        raise RuntimeError(
            f"a batch mixes image sizes: sample 0 of it is {shapes[0]}, sample {other} is {shapes[other]}. "
            "Resize in the transform, or pass collate_fn=list to get lists of samples"
        ) from error


def _image(sample: Any) -> Any:
    return sample[0] if isinstance(sample, tuple) else sample


def _check_collates(dataset: Any) -> None:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, ShardDataset) and dataset.yields_pil:
        raise TypeError(
            'this dataset yields PIL images, which cannot be put into a batch: give ShardDataset decode="tensor" '
            "or a transform that ends in a tensor (torchvision.transforms.ToTensor, PILToTensor), "
            "or pass collate_fn=list"
        )


def _in_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
