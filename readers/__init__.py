"""Read packed sets of images in PyTorch.

::

    from readers import ShardDataset, shard_loader

    train = ShardDataset("shards/train", transform=transform)
    loader = shard_loader(train, batch_size=256, shuffle=True)

Names are resolved on first use, so that ``Manifest`` and the errors load without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .dataset import ShardDataset
    from .errors import (
        ManifestError,
        ReaderError,
        RecordCorruptError,
        RecordDecodeError,
        ShardCorruptError,
        ShardNotFoundError,
        UnfinishedSetError,
    )
    from .loader import collate, shard_loader
    from .manifest import Manifest
    from .samples import Sample

__all__ = [
    "Manifest",
    "ManifestError",
    "ReaderError",
    "RecordCorruptError",
    "RecordDecodeError",
    "Sample",
    "ShardCorruptError",
    "ShardDataset",
    "ShardNotFoundError",
    "UnfinishedSetError",
    "collate",
    "shard_loader",
]

_HOMES: Final = {
    "Manifest": "manifest",
    "Sample": "samples",
    "ShardDataset": "dataset",
    "collate": "loader",
    "shard_loader": "loader",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
