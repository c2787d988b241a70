"""Pack folders of images into HDF5 or LMDB shards.

::

    from packer import PackOptions, pack

    report = pack("photos", "shards", PackOptions(format="lmdb"))

Names are resolved on first use: ``pack --help`` waits for no library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .errors import PackError, PackUsageError, PlanDiffersError, TooManyRejectsError
    from .options import PackOptions
    from .report import PackReport
    from .run import pack

__all__ = [
    "PackError",
    "PackOptions",
    "PackReport",
    "PackUsageError",
    "PlanDiffersError",
    "TooManyRejectsError",
    "pack",
]

_HOMES: Final = {"PackOptions": "options", "PackReport": "report", "pack": "run"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
