"""Where a shard's header, index and values lie in its file: one module a container, one shape.

``LOCATE[container](read, file_bytes)`` returns a `Geometry`; nothing else asks which container
is in use. No container library is loaded to read a set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from . import hdf5, lmdb
from .header import Geometry, Locate, ShardFormatError

__all__ = ["LOCATE", "Geometry", "ShardFormatError"]

LOCATE: Final[Mapping[str, Locate]] = {"hdf5": hdf5.locate, "lmdb": lmdb.locate}
