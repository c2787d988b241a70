"""Records -> a shard's file: one module a container, one shape.

``WRITERS[container](private, planned)`` takes records by ``add`` and completes the file by ``finish``;
nothing else asks which container is in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .hdf5 import Hdf5Writer
from .index import ShardWriter
from .lmdb import LmdbWriter

__all__ = ["WRITERS", "ShardWriter"]

WRITERS: Final[Mapping[str, type[ShardWriter]]] = {"hdf5": Hdf5Writer, "lmdb": LmdbWriter}
