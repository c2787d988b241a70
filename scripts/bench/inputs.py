"""Images and packed sets to measure with, made once and kept."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import click

from packer import PackOptions, pack


def images(work: str, count: int, mean_bytes: int) -> str:
    """A folder of ``count`` drawn images of about ``mean_bytes`` each."""
    out = os.path.join(work, f"images-{count}-{mean_bytes}")
    click.echo(f"images: {out}", err=True)
    _make_images().make_images(out, count=count, classes=min(100, count), seed=0, mean_bytes=mean_bytes)
    return out


def packed(source: str, container: str, **options: object) -> str:
    """``source`` packed without checks, named by its options."""
    name = "-".join([container, *(f"{key}={value}" for key, value in options.items())])
    out = f"{source}-{name}"
    click.echo(f"packed: {out}", err=True)
    pack(source, out, PackOptions(format=container, check="none", **options))  # type: ignore[arg-type]
    return out


def _make_images() -> ModuleType:
    path = os.path.join(os.path.dirname(__file__), os.pardir, "make_images.py")
    spec = importlib.util.spec_from_file_location("make_images", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
