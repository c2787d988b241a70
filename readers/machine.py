"""What a measurement ran on: versions, machine, file systems. Facts that cannot be found are None."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from .system import usable_cores

__all__ = ["commit", "machine", "storage", "versions"]

_PACKAGES: Final = ("shardpack", "torch", "numpy", "pillow")
_GIT_SECONDS: Final = 5


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that do the work."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The git commit of this code, with "+" if files differ from it; None where it is installed, not checked out."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.exists(os.path.join(root, ".git")):
        return None
    head = _git(root, "rev-parse", "HEAD")
    return head and head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: str, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", root, *words], capture_output=True, text=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def machine() -> dict[str, Any]:
    """System, processor, usable cores, memory in bytes, and how busy it is (the load of the last minute)."""
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "processor": _first_match("/proc/cpuinfo", r"model name\s*: (.*)") or platform.processor() or None,
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": _memory_bytes(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def storage(path: str) -> dict[str, Any]:
    """File system and disk below a path: ``file_system`` (as ext4), ``device``, ``rotational``, ``model``."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}" if hasattr(os, "major") else ""
    mount = _first_match("/proc/self/mountinfo", rf"\S+ \S+ {number} .* - (\S+ \S+) .*") or ""
    kind, _, name = mount.partition(" ")
    disk = f"/sys/dev/block/{number}"
    rotational = _first_match(f"{disk}/queue/rotational", "(.*)") or _first_match(f"{disk}/../queue/rotational", "(.*)")
    return {
        "file_system": kind or None,
        "device": name or None,
        "rotational": None if rotational is None else rotational == "1",
        "model": _first_match(f"{disk}/device/model", "(.*)") or _first_match(f"{disk}/../device/model", "(.*)"),
    }


def _first_match(path: str, pattern: str) -> str | None:
    """First group of the first line of a file that matches."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            matches = (re.fullmatch(pattern, line.rstrip()) for line in file)
            return next((match[1].strip() for match in matches if match), None)
    except OSError:
        return None
