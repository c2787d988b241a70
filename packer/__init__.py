"""Pack folders of images into HDF5 or LMDB shards.

::

    from packer import PackOptions, pack

    report = pack("photos", "shards", PackOptions(format="lmdb"))
"""

from __future__ import annotations

from .errors import PackError, PackUsageError, TooManyRejectsError
from .options import PackOptions
from .report import PackReport
from .run import pack

__all__ = ["PackError", "PackOptions", "PackReport", "PackUsageError", "TooManyRejectsError", "pack"]
