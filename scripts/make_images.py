"""Draw natural-looking photos from a seed into class folders, for trials and benchmarks without data.

    python scripts/make_images.py OUT --count 2000 --classes 10 --bytes 50K

A picture is a backdrop, a few soft-edged shapes in the hue of its class, and texture with the 1/f spectrum
of photographs, so that encoded sizes are those of photographs too. Picture ``i`` follows from the arguments
and ``i`` alone: the same command gives the same bytes with any number of workers, and draws what is missing
after an interruption.
"""

import bisect
import colorsys
import functools
import io
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import click
import numpy as np
import numpy.typing as npt
from PIL import Image
from tqdm import tqdm

__all__ = ["MARKER_NAME", "MakeImagesError", "make_images", "parse_bytes"]

MARKER_NAME = ".made-by-make-images.json"  # hidden: packing skips it
RECIPE = 1  # raise it when the same arguments begin to give other pictures
MAX_COUNT = 1_000_000
MAX_CLASSES = 1_000  # three digits keep the folders' names in order
MIN_SIDE_PIXELS = 8
MAX_SIDE_PIXELS = 2048  # each worker's texture bank takes 54 bytes for each pixel of a square this wide
DEFAULT_SIZE = "160-640"
SUFFIXES = {"jpeg": ".jpg", "png": ".png", "webp": ".webp"}
# At Pillow's defaults PNG and WebP would take several times as long as the drawing.
ENCODER_OPTIONS: dict[str, dict[str, int]] = {"jpeg": {}, "png": {"compress_level": 1}, "webp": {"method": 1}}
UNIT_BYTES = {"": 1, "K": 1024, "M": 1024**2}
MAX_WORKERS = 256
CHUNK_PICTURES = 32  # large enough to hide the pool's cost at 32x32, small enough for a lively progress bar

FloatArray = npt.NDArray[np.float32]
Outline = Callable[[FloatArray, FloatArray], FloatArray]


class MakeImagesError(ValueError):
    """Arguments or an output folder that cannot be used; the message is one line for the user."""


# --- Arguments -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """All that decides the pictures, as given; the marker file keeps it, so that no folder mixes sets."""

    count: int
    classes: int
    seed: int
    size: str | None
    mean_bytes: int | None
    quality: int
    image_format: str
    recipe: int = RECIPE

    def __post_init__(self) -> None:
        """Raise MakeImagesError for a number out of its range or an unknown format."""
        _check_range("count", self.count, 1, MAX_COUNT)
        _check_range("classes", self.classes, 1, min(MAX_CLASSES, self.count))
        _check_range("seed", self.seed, 0, 2**63 - 1)
        _check_range("quality", self.quality, 1, 100)
        if self.mean_bytes is not None:
            _check_range("bytes", self.mean_bytes, 1, 2**31 - 1)
        if self.image_format not in SUFFIXES:
            raise MakeImagesError(f"format must be {', '.join(SUFFIXES)}, got {self.image_format!r}")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise MakeImagesError(f"{name} must be {low:,} to {high:,}, got {value:,}")


class Sizes(NamedTuple):
    """Longer sides of ``low`` to ``high`` pixels in photos' proportions, or one ``fixed`` (width, height)."""

    low: float
    high: float
    fixed: tuple[int, int] | None = None

    def scaled(self, factor: float) -> "Sizes":
        """Multiply the range of the longer side, held to the sides that can be drawn."""
        return Sizes(_held(self.low * factor), _held(self.high * factor))

    def pick(self, index: int, rng: np.random.Generator) -> tuple[int, int]:
        """Choose width and height in pixels for one picture."""
        if self.fixed is not None:
            return self.fixed
        longer = self.low * (self.high / self.low) ** _spread(index, SIZE_STEP)
        ratio = PHOTO_RATIOS[int(_spread(index, RATIO_STEP) * len(PHOTO_RATIOS))]
        size = (round(longer), max(MIN_SIDE_PIXELS, round(longer / ratio)))
        return size if rng.random() < LANDSCAPE_SHARE else size[::-1]


def _held(side: float) -> float:
    return min(max(side, MIN_SIDE_PIXELS), MAX_SIDE_PIXELS)


PHOTO_RATIOS = (4 / 3, 4 / 3, 3 / 2, 3 / 2, 16 / 9, 1.0)
LANDSCAPE_SHARE = 0.7
# Irrational and unrelated, so that sizes, proportions and detail vary independently of each other.
SIZE_STEP, RATIO_STEP, DETAIL_STEP = (math.sqrt(5) - 1) / 2, math.sqrt(3), math.sqrt(2)


def _spread(index: int, step: float) -> float:
    """Give a number in [0, 1) for a picture, spread over pictures more evenly than chance.

    So the first 40 pictures have the mean size of the whole set to 1 %, which `fit_to_bytes` relies on.
    """
    return (0.5 + index * step) % 1.0


def parse_size(text: str) -> Sizes:
    """Read ``WxH``, or ``LOW-HIGH`` for a range of the longer side, in pixels."""
    match = re.fullmatch(r"(\d{1,9})([x-])(\d{1,9})", text.strip().lower())
    if match is None:
        raise MakeImagesError(f"size must be WxH or LOW-HIGH in pixels, like 500x375 or 160-640, got {text!r}")
    first, second = int(match[1]), int(match[3])
    _check_range("size", first, MIN_SIDE_PIXELS, MAX_SIDE_PIXELS)
    _check_range("size", second, MIN_SIDE_PIXELS, MAX_SIDE_PIXELS)
    if match[2] == "x":
        return Sizes(first, second, (first, second))
    return Sizes(min(first, second), max(first, second))


def parse_bytes(text: str) -> int:
    """Read a number of bytes such as ``5000``, ``5K`` or ``1.5MiB``; K is 1,024 bytes."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KM]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise MakeImagesError(f"bytes must be a number such as 5000, 5K or 1.5M, got {text!r}")
    return round(float(match[1]) * UNIT_BYTES[match[2].upper()])


# --- Drawing: chance to pixels -------------------------------------------------------------------


class Bank(NamedTuple):
    """Fields that pictures are cropped from: an FFT for each picture would take most of the time.

    Each is float32 ``(3, side, side)`` with zero mean and deviation about 1, within ±FIELD_LIMIT.
    """

    grain: FloatArray  # amplitude 1/f, the spectrum of photographs: Field, J. Opt. Soc. Am. A 4, 2379 (1987)
    form: FloatArray  # steeper, so smoother: the outlines of hills and leaves


FIELD_LIMIT = 2.5


class Shape(NamedTuple):
    """One shape in a picture. Lengths are in half shorter sides."""

    across: float  # centre, -1 to 1 over the picture's width
    down: float  # centre, -1 to 1 over its height
    radius: float
    angle: float  # radians
    sharpness: float  # the edge fades over 1/sharpness of the radius
    hue_shift: float
    saturation: float
    value: float


SHAPE_RANGE = np.array(
    [
        Shape(-1, -1, radius=0.15, angle=0, sharpness=2, hue_shift=-0.02, saturation=0.4, value=0.45),
        Shape(1, 1, radius=0.55, angle=math.tau, sharpness=14, hue_shift=0.02, saturation=0.8, value=0.95),
    ]
)


class Backdrop(NamedTuple):
    """What is behind the shapes: far above and near below, with mist or a skyline between."""

    tilt: float
    horizon: float  # -1 at the top to 1 at the bottom of a square
    log_steepness: float  # low: mist, high: a skyline
    far_hue_shift: float
    far_saturation: float
    far_value: float
    near_hue_shift: float
    near_saturation: float
    near_value: float


BACKDROP_RANGE = np.array(
    [
        Backdrop(-0.4, -0.5, -0.7, -0.3, 0.05, 0.6, -0.1, 0.15, 0.2),
        Backdrop(0.4, 0.5, 2.5, 0.3, 0.35, 0.95, 0.1, 0.5, 0.5),
    ]
)
MAX_SHAPES = 3
GRAIN = 0.25  # change of brightness per deviation of the grain: 0.32 bytes a pixel as JPEG of quality 85
SHAPE_GRAIN = 0.7  # shapes are smoother than what surrounds them
UNEVENNESS = 0.12  # of outlines, in radii for each deviation of the form field


def _disc(u: FloatArray, v: FloatArray) -> FloatArray:
    return u * u + v * v


def _box(u: FloatArray, v: FloatArray) -> FloatArray:
    larger: FloatArray = np.maximum(abs(u), abs(v))
    return larger


def _leaf(u: FloatArray, v: FloatArray) -> FloatArray:
    return u * u + 3 * abs(v)


# Below 1 inside, above 1 outside. With UNEVENNESS no outline reaches further than the corner of the box.
OUTLINES: tuple[Outline, ...] = (_disc, _box, _leaf)
REACH_RADII = math.sqrt(2) * (1 + UNEVENNESS * FIELD_LIMIT)


class Stage(NamedTuple):
    """What all parts of one picture are drawn with, in pixels' order of rows and columns."""

    x: FloatArray  # (W,), from the middle to the right, in half shorter sides
    y: FloatArray  # (H, 1), from the middle down
    form: FloatArray  # (H, W), makes outlines uneven
    grain: FloatArray  # (H, W), added to brightness 1


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream,)))


@functools.lru_cache(maxsize=1)
def texture_bank(seed: int, side: int) -> Bank:
    """Make the bank for a seed once in each process (0.3 s for pictures of 640 pixels)."""
    rng = _generator(seed, MAX_COUNT)  # the stream after the last picture's
    return Bank(grain=_fields(rng, side, slope=1.0), form=_fields(rng, side, slope=1.8))


def _fields(rng: np.random.Generator, side: int, slope: float) -> FloatArray:
    """Filter white noise ``(3, side, side)`` so that amplitude falls as frequency to the power ``-slope``."""
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)).astype(np.float32)
    frequency[0, 0] = np.inf  # no constant part
    white = rng.standard_normal((3, side, side), dtype=np.float32)
    fields = np.fft.irfft2(np.fft.rfft2(white) * frequency**-slope, s=(side, side)).astype(np.float32)
    fields /= fields.std(axis=(1, 2), keepdims=True)
    return _clip(fields, -FIELD_LIMIT, FIELD_LIMIT)


def _clip(values: FloatArray, low: float, high: float) -> FloatArray:
    """Limit values in place; on a small picture `np.clip` takes four times as long."""
    limited: FloatArray = np.minimum(np.maximum(values, low, out=values), high, out=values)
    return limited


def _between(rng: np.random.Generator, bounds: npt.NDArray[np.float64], count: int) -> list[list[float]]:
    """Draw ``count`` rows between the two rows of ``bounds``; `rng.uniform` takes three times as long."""
    low, high = bounds
    rows: list[list[float]] = (low + (high - low) * rng.random((count, len(low)))).tolist()
    return rows


def _crop(rng: np.random.Generator, fields: FloatArray, height: int, width: int) -> FloatArray:
    """Cut ``(height, width)`` out of one field at random, flipped at random: a view, nothing is copied."""
    count, side, _ = fields.shape
    which, down, across, flips = rng.random(4).tolist()
    top, left = int(down * (side - height + 1)), int(across * (side - width + 1))
    patch: FloatArray = fields[int(which * count), top : top + height, left : left + width]
    return patch[:: -1 if flips < 0.5 else 1, :: -1 if flips % 0.5 < 0.25 else 1]


def _colour(hue: float, saturation: float, value: float) -> FloatArray:
    """Give a colour as float32 ``(3, 1, 1)``, RGB, 0-255, from hue (turns), saturation and value (0-1)."""
    red_green_blue = colorsys.hsv_to_rgb(hue % 1.0, saturation, value)
    return np.array(red_green_blue, dtype=np.float32).reshape(3, 1, 1) * 255


def _axis(length: int, shorter: int) -> FloatArray:
    """Give pixel centres from the middle of the picture in half shorter sides, so that discs stay round."""
    return (np.arange(length, dtype=np.float32) - (length - 1) / 2) * (2 / shorter)


def draw_picture(
    rng: np.random.Generator, bank: Bank, size: tuple[int, int], hue: float, outline: Outline, detail: float
) -> npt.NDArray[np.uint8]:
    """Draw one picture.

    Args:
        rng: Source of all chance in this picture.
        bank: Texture at least as large as the picture.
        size: Width and height in pixels.
        hue: Dominant hue in turns, 0.0 red.
        outline: Form of its shapes, one of OUTLINES.
        detail: Strength of the texture; 1.0 is about that of photographs.

    Returns:
        uint8 ``(H, W, 3)``, RGB, 0-255.
    """
    width, height = size
    x, y = _axis(width, min(size)), _axis(height, min(size))[:, None]
    grain = _crop(rng, bank.grain, height, width) * (GRAIN * detail)
    stage = Stage(x, y, _crop(rng, bank.form, height, width), grain)
    canvas = _paint_backdrop(Backdrop(*_between(rng, BACKDROP_RANGE, 1)[0]), stage, hue)
    for shape in _between(rng, SHAPE_RANGE, count=1 + int(rng.random() * MAX_SHAPES)):
        _paint_shape(canvas, Shape(*shape), stage, hue, outline)
    return _to_pixels(canvas)


def _nearness(backdrop: Backdrop, stage: Stage) -> FloatArray:
    """Give float32 ``(H, W)``, 0 (far, above) to 1 (near, below)."""
    steepness = math.exp(backdrop.log_steepness)
    slope = stage.form * (0.3 * steepness)
    slope += stage.x * (backdrop.tilt * steepness)
    slope += stage.y * steepness + (0.5 - backdrop.horizon * steepness)
    return _clip(slope, 0, 1)


def _paint_backdrop(backdrop: Backdrop, stage: Stage, hue: float) -> FloatArray:
    """Give float32 ``(3, H, W)``, RGB, 0-255."""
    nearness = _nearness(backdrop, stage)
    far = _colour(hue + backdrop.far_hue_shift, backdrop.far_saturation, backdrop.far_value)
    near = _colour(hue + backdrop.near_hue_shift, backdrop.near_saturation, backdrop.near_value)
    canvas = nearness * (near - far)
    canvas += far
    # Through a lens, what is near shows more texture than what is far.
    nearness += 0.4
    nearness *= stage.grain
    nearness += 1
    canvas *= nearness
    return canvas


def _paint_shape(canvas: FloatArray, shape: Shape, stage: Stage, hue: float, outline: Outline) -> None:
    """Paint one shape, lit from the upper left, over ``canvas`` ``(3, H, W)``."""
    x, y = stage.x, stage.y
    across, down = shape.across * float(x[-1]), shape.down * float(y[-1, 0])
    reach = REACH_RADII * shape.radius
    # Only the window around the shape is computed: that halves the time of a picture.
    columns = slice(*np.searchsorted(x, (across - reach, across + reach)).tolist())
    rows = slice(*np.searchsorted(y[:, 0], (down - reach, down + reach)).tolist())
    dx, dy = (x[columns] - across) / shape.radius, (y[rows] - down) / shape.radius
    cos, sin = math.cos(shape.angle), math.sin(shape.angle)
    edge = outline(dx * cos + dy * sin, dy * cos - dx * sin)
    edge += stage.form[rows, columns] * UNEVENNESS
    mask = _clip((1 - edge) * shape.sharpness, 0, 1)
    window = canvas[:, rows, columns]
    light = 1 - 0.25 * (dx + dy) + stage.grain[rows, columns] * SHAPE_GRAIN
    paint = _colour(hue + shape.hue_shift, shape.saturation, shape.value) * light
    paint -= window
    paint *= mask
    window += paint


def _to_pixels(canvas: FloatArray) -> npt.NDArray[np.uint8]:
    """Turn float32 ``(3, H, W)`` into uint8 ``(H, W, 3)``."""
    planes = _clip(canvas, 0, 255).astype(np.uint8)
    pixels = np.empty((*planes.shape[1:], 3), dtype=np.uint8)
    for channel, plane in enumerate(planes):  # twice as fast as a transposed copy
        pixels[:, :, channel] = plane
    return pixels


# --- Encoding: pixels to a mean size -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """All that a worker needs to draw any picture of the set."""

    seed: int
    classes: int
    sizes: Sizes
    image_format: str
    quality: int
    detail: float = 1.0

    def encode(self, index: int) -> bytes:
        """Draw picture ``index`` and give its encoded bytes."""
        rng = _generator(self.seed, index)
        size = self.sizes.pick(index, rng)
        label = index % self.classes
        hue = (label + rng.uniform(-0.25, 0.25)) / self.classes
        detail = self.detail * 2 ** (_spread(index, DETAIL_STEP) - 0.5)  # photographs differ in detail too
        pixels = draw_picture(rng, self._bank(), size, hue, OUTLINES[label % len(OUTLINES)], detail)
        buffer = io.BytesIO()
        options = ENCODER_OPTIONS[self.image_format]
        Image.fromarray(pixels).save(buffer, self.image_format, quality=self.quality, **options)
        return buffer.getvalue()

    def _bank(self) -> Bank:
        # Half as wide again as the largest picture, so that there are many ways to crop it.
        return texture_bank(self.seed, max(256, math.ceil(1.5 * max(self.sizes.fixed or (self.sizes.high,)))))


DETAIL_RANGE = (1 / 6, 1.6)  # from blurred to rough; beyond, pictures no longer look natural
# Pictures drawn to know the mean size: of one size they differ less than of many.
PROBES_ONE_SIZE, PROBES_MANY_SIZES = 24, 40


def plan_rendering(arguments: Arguments) -> Rendering:
    """Settle sizes, detail and quality, so that the mean encoded size is the one asked for, if one is.

    Raises:
        MakeImagesError: No detail and quality give that mean at these sizes.
    """
    rendering = Rendering(
        seed=arguments.seed,
        classes=arguments.classes,
        sizes=parse_size(arguments.size or DEFAULT_SIZE),
        image_format=arguments.image_format,
        quality=arguments.quality,
    )
    if arguments.mean_bytes is None:
        return rendering
    probes = PROBES_ONE_SIZE if rendering.sizes.fixed else PROBES_MANY_SIZES
    probes = min(arguments.count, probes)
    return fit_to_bytes(rendering, arguments.mean_bytes, may_resize=arguments.size is None, probes=probes)


def fit_to_bytes(rendering: Rendering, target: int, *, may_resize: bool, probes: int) -> Rendering:
    """Bring the mean encoded size of the first ``probes`` pictures to ``target`` bytes.

    Sizes change if they may, as detail and quality then stay natural; otherwise detail changes, and quality
    only when no detail will do.

    Raises:
        MakeImagesError: The target is out of reach.
    """

    @functools.cache
    def mean_bytes(candidate: Rendering) -> int:
        return round(sum(len(candidate.encode(index)) for index in range(probes)) / probes)

    if may_resize:
        return _fit_sizes(rendering, target, mean_bytes)
    return _fit_detail(_fit_quality(rendering, target, mean_bytes), target, mean_bytes)


def _fit_sizes(rendering: Rendering, target: int, mean_bytes: Callable[[Rendering], int]) -> Rendering:
    """Scale the range of sizes until the mean is within 1 %: a few steps, as headers do not scale."""
    for _ in range(12):
        mean = mean_bytes(rendering)
        if abs(mean - target) <= target / 100:
            return rendering
        rendering = replace(rendering, sizes=rendering.sizes.scaled(math.sqrt(target / mean)))
    raise MakeImagesError(f"bytes of {target:,} cannot be had: {mean:,} is near the limit; choose a size too")


def _fit_quality(rendering: Rendering, target: int, mean_bytes: Callable[[Rendering], int]) -> Rendering:
    """Move quality no further than needed for some detail to meet the target."""
    blurred, rough = (replace(rendering, detail=detail) for detail in DETAIL_RANGE)
    if mean_bytes(blurred) > target:
        below = range(1, rendering.quality + 1)
        found = bisect.bisect_right(below, target, key=lambda q: mean_bytes(replace(blurred, quality=q))) - 1
        return replace(rendering, quality=below[max(0, found)])
    if mean_bytes(rough) < target:
        above = range(rendering.quality, 101)
        found = bisect.bisect_left(above, target, key=lambda q: mean_bytes(replace(rough, quality=q)))
        return replace(rendering, quality=above[min(found, len(above) - 1)])
    return rendering


def _fit_detail(rendering: Rendering, target: int, mean_bytes: Callable[[Rendering], int]) -> Rendering:
    """Bisect detail on a log scale: 7 steps settle the mean to 1 %."""
    low, high = DETAIL_RANGE
    least, most = (mean_bytes(replace(rendering, detail=detail)) for detail in DETAIL_RANGE)
    if not least <= target <= most:
        limit = f"at least {least:,}" if target < least else f"at most {most:,}"
        raise MakeImagesError(f"bytes of {target:,} cannot be had: {limit} at this size and format")
    for _ in range(7):
        middle = math.sqrt(low * high)
        if mean_bytes(replace(rendering, detail=middle)) < target:
            low = middle
        else:
            high = middle
    return replace(rendering, detail=math.sqrt(low * high))


# --- Writing: bytes to files ---------------------------------------------------------------------


def make_images(
    out: str | os.PathLike[str],
    *,
    count: int = 2000,
    classes: int = 10,
    seed: int = 0,
    size: str | None = None,
    mean_bytes: int | None = None,
    quality: int = 85,
    image_format: str = "jpeg",
    workers: int = 1,
    on_written: Callable[[int], object] = lambda pictures: None,
) -> int:
    """Draw a set of pictures, ``out/class_000/img_0000000.jpg`` and so on; ``i`` is in class ``i % classes``.

    Args:
        out: New or empty folder, or one made with the same arguments, whose files are left alone.
        count: Pictures in the set, 1 to 1,000,000.
        classes: Class folders, 1 to 1,000 and at most ``count``.
        seed: Any non-negative integer below 2**63.
        size: ``WxH``, or ``LOW-HIGH`` for a range of the longer side, in pixels. None: 160-640, and
            ``mean_bytes`` scales that range.
        mean_bytes: Mean encoded size to aim at in bytes; None leaves it to size and quality.
        quality: JPEG or WebP quality, 1 to 100.
        image_format: "jpeg", "png" or "webp".
        workers: Processes that draw, 1 to 256; the pictures do not depend on it. Where processes are not
            forked, more than 1 needs this module to be importable by its name.
        on_written: Called with the number of pictures just written, now and then.

    Returns:
        Number of pictures written by this call; 0 if all were there.

    Raises:
        MakeImagesError: An argument is out of range, no detail and quality give ``mean_bytes``, or ``out``
            holds anything else; nothing was written.
    """
    arguments = Arguments(
        count=count,
        classes=classes,
        seed=seed,
        size=size,
        mean_bytes=mean_bytes,
        quality=quality,
        image_format=image_format,
    )
    _check_range("workers", workers, 1, MAX_WORKERS)
    folder = os.fspath(out)
    refuse_other_set(folder, arguments)
    missing = missing_pictures(folder, arguments)
    if missing:
        rendering = plan_rendering(arguments)
        _claim(folder, arguments)
        for written in _draw_all(functools.partial(write_pictures, folder, rendering), missing, workers):
            on_written(written)
    return len(missing)


def refuse_other_set(folder: str, arguments: Arguments) -> None:
    """Raise MakeImagesError if the folder holds anything but pictures made with these arguments."""
    if not os.path.lexists(folder):
        return
    if not os.path.isdir(folder):
        raise MakeImagesError(f"{folder}: not a folder; name a new one")
    names = os.listdir(folder)
    if MARKER_NAME in names:
        _refuse_other_arguments(folder, arguments)
    elif names:
        raise MakeImagesError(f"{folder}: not empty and not made by make_images; name a new folder")


def _refuse_other_arguments(folder: str, arguments: Arguments) -> None:
    """Compare with what the marker file holds."""
    try:
        with open(os.path.join(folder, MARKER_NAME), encoding="utf-8") as marker:
            made_with = dict(json.load(marker))
    except (ValueError, TypeError) as error:
        raise MakeImagesError(f"{folder}: {MARKER_NAME} is damaged ({error}); name a new folder") from error
    for name, wanted in asdict(arguments).items():
        if made_with.get(name) != wanted:
            found = made_with.get(name)
            raise MakeImagesError(f"{folder}: made with {name} {found}, not {wanted}; name a new folder")


def picture_path(folder: str, index: int, classes: int, image_format: str) -> str:
    """Give the path of a picture's file: classes take turns."""
    return f"{folder}/class_{index % classes:03d}/img_{index:07d}{SUFFIXES[image_format]}"


def missing_pictures(folder: str, arguments: Arguments) -> list[int]:
    """List the pictures that have no file yet, in order."""
    return [
        index
        for index in range(arguments.count)
        if not os.path.exists(picture_path(folder, index, arguments.classes, arguments.image_format))
    ]


def _claim(folder: str, arguments: Arguments) -> None:
    """Make the folders and the marker; the marker comes first, so that an interrupted run knows its own."""
    os.makedirs(folder, exist_ok=True)
    _write_whole(f"{folder}/{MARKER_NAME}", (json.dumps(asdict(arguments), indent=1) + "\n").encode())
    for label in range(arguments.classes):
        class_folder = os.path.dirname(picture_path(folder, label, arguments.classes, arguments.image_format))
        os.makedirs(class_folder, exist_ok=True)


def _draw_all(write: Callable[[Sequence[int]], int], indices: Sequence[int], workers: int) -> Iterator[int]:
    """Write the pictures in chunks, here or in a pool, and give the number in each chunk as it is done."""
    chunks = [indices[start : start + CHUNK_PICTURES] for start in range(0, len(indices), CHUNK_PICTURES)]
    workers = min(workers, len(chunks))
    if workers == 1:
        yield from map(write, chunks)
        return
    # Ctrl-C reaches the whole process group: only this process answers it, workers finish their chunk.
    ignore_interrupt = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(workers, initializer=ignore_interrupt) as pool:
        yield from pool.map(write, chunks)


def write_pictures(folder: str, rendering: Rendering, indices: Sequence[int]) -> int:
    """Draw and write some pictures; give their number."""
    for index in indices:
        path = picture_path(folder, index, rendering.classes, rendering.image_format)
        _write_whole(path, rendering.encode(index))
    return len(indices)


def _write_whole(path: str, data: bytes) -> None:
    """Write a file under a hidden name, which a later run overwrites, and name it only when it is whole."""
    folder, name = os.path.split(path)
    temporary = f"{folder}/.{name}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


# --- Command -------------------------------------------------------------------------------------


class UsageMistake(click.ClickException):
    """A mistake of the user: one line, status 2."""

    exit_code = 2


class OneLineCommand(click.Command):
    """A command that reports its own wrong options in one line too, without repeating how it is used."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise UsageMistake(error.format_message()) from error


@click.command(cls=OneLineCommand, context_settings={"show_default": True})
@click.argument("out", type=click.Path())
@click.option("--count", default=2000, help="Pictures to draw, at most 1,000,000.")
@click.option("--classes", default=10, help="Class folders, at most 1,000.")
@click.option("--seed", default=0, help="Another seed gives other pictures.")
@click.option("--size", help="WxH, or LOW-HIGH for the longer side, in pixels.  [default: 160-640]")
@click.option("--bytes", "mean_bytes", help="Mean encoded size to aim at: 5K, 50K (K is 1,024 bytes).")
@click.option("--quality", default=85, help="JPEG or WebP quality, 1-100.")
@click.option("--format", "image_format", type=click.Choice(list(SUFFIXES)), default="jpeg")
@click.option("--workers", default=1, help="Processes that draw; the pictures do not depend on it.")
def main(out: str, count: int, mean_bytes: str | None, **options: Any) -> None:
    """Draw natural-looking photos into class folders under OUT.

    The same command gives the same files; run again, it draws only those that are missing. --bytes scales
    the default sizes, or with --size changes detail and, where that is not enough, quality.
    """
    try:
        target = None if mean_bytes is None else parse_bytes(mean_bytes)
        # No bar before the first second or off a terminal: an error stays the only line.
        with tqdm(total=count, unit="image", delay=1, leave=False, disable=None) as bar:
            written = make_images(out, count=count, mean_bytes=target, on_written=bar.update, **options)
    except MakeImagesError as error:
        raise UsageMistake(str(error)) from error
    except (OSError, BrokenProcessPool) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo("Interrupted. The same command draws the rest.", err=True)
        sys.exit(130)
    click.echo(f"{out}: {count:,} images, {written:,} of them drawn now")


if __name__ == "__main__":
    main()
