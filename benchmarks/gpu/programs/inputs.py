"""Input pipelines of three kinds: what the processor does for each batch before the GPU gets it.

image: JPEGs, decoded, cropped at random, resized and flipped: milliseconds of a core for each image.
audio: waveforms to log-mel spectrograms: about as much for each.
text: tokens drawn at random: hardly anything.

Without Pillow, images are made by inverse cosine transforms of as many blocks as a JPEG of that size has, and resized.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    pictures: Any = import_module("PIL.Image")
except ImportError:
    pictures = None

JPEGS, JPEG_WIDTH, JPEG_HEIGHT, JPEG_QUALITY = 64, 500, 376, 90
IMAGE_SIDE, SMALL_IMAGE_SIDE = 224, 64
AUDIO_RATE, AUDIO_SECONDS, MELS, FFT, HOP = 16_000, 1, 64, 512, 160
TOKENS, SMALL_TOKENS, VOCABULARY = 512, 64, 8_192
AHEAD = 2  # batches that each worker may be ahead
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class InputShape:
    """The size of a batch, and of one example in it."""

    batch: int
    side: int = 0
    tokens: int = 0


def shape_of(model: str, *, small: bool) -> InputShape:
    """Return the batch of a model; `small` is for a machine without a GPU."""
    if model == "image":
        return InputShape(4 if small else 64, side=SMALL_IMAGE_SIDE if small else IMAGE_SIDE)
    return InputShape(2 if small else 16, tokens=SMALL_TOKENS if small else TOKENS)


def make_batch(model: str, shape: InputShape, number: int) -> Array:
    """Return batch `number` of a model."""
    rng = np.random.default_rng(number)
    if model == "text":
        return rng.integers(0, VOCABULARY, (shape.batch, shape.tokens + 1))
    make: Callable[[np.random.Generator], Array] = partial(_image, shape.side) if model == "image" else _mel_spectrogram
    return np.stack([make(rng) for _ in range(shape.batch)])


def _image(side: int, rng: np.random.Generator) -> Array:
    if pictures is None:
        pixels = _inverse_transforms(rng)
        rows = np.linspace(0, pixels.shape[0] - 1, side).astype(int)
        columns = np.linspace(0, pixels.shape[1] - 1, side).astype(int)
        return np.ascontiguousarray(pixels[rows][:, columns])
    left, top = int(rng.integers(0, JPEG_WIDTH // 4)), int(rng.integers(0, JPEG_HEIGHT // 4))
    box = (left, top, left + 3 * JPEG_WIDTH // 4, top + 3 * JPEG_HEIGHT // 4)
    decoded = pictures.open(io.BytesIO(_jpegs()[int(rng.integers(JPEGS))])).convert("RGB")
    pixels = np.asarray(decoded.resize((side, side), pictures.Resampling.BILINEAR, box))
    return pixels[:, ::-1].copy() if rng.integers(2) else pixels


@cache
def _jpegs() -> list[bytes]:
    """Return synthetic pictures: smooth areas with some noise, which compress like photographs."""
    rng, made = np.random.default_rng(0), []
    for _ in range(JPEGS):
        coarse = rng.integers(0, 255, (JPEG_HEIGHT // 40 + 1, JPEG_WIDTH // 40 + 1, 3))
        smooth = np.kron(coarse, np.ones((40, 40, 1)))[:JPEG_HEIGHT, :JPEG_WIDTH]
        noisy = np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
        stream = io.BytesIO()
        pictures.fromarray(noisy).save(stream, "JPEG", quality=JPEG_QUALITY)
        made.append(stream.getvalue())
    return made


@cache
def _cosines() -> Array:
    places = np.arange(8)
    return np.cos(np.pi * (2 * places[:, None] + 1) * places[None, :] / 16).astype(np.float32)


@cache
def _coefficients() -> Array:
    """Return the coefficients of the blocks of a picture's brightness."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((JPEG_HEIGHT // 8, JPEG_WIDTH // 8, 8, 8), dtype=np.float32)


def _inverse_transforms(rng: np.random.Generator) -> Array:
    blocks = np.roll(_coefficients(), int(rng.integers(8)), axis=1)
    columns = (blocks.reshape(-1, 8) @ _cosines().T).reshape(blocks.shape).swapaxes(2, 3)
    pixels = (columns.reshape(-1, 8) @ _cosines().T).reshape(blocks.shape)
    bright = np.clip(128 + 16 * pixels.transpose(0, 3, 1, 2).reshape(JPEG_HEIGHT, -1), 0, 255).astype(np.uint8)
    return np.stack([bright, bright // 2, 255 - bright], axis=-1)


@cache
def _mel_filters() -> Array:
    edges = np.linspace(0, FFT // 2, MELS + 2)
    bins = np.arange(FFT // 2 + 1)[:, None]
    rising, falling = (bins - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - bins) / np.diff(edges)[1:]
    return np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32)


def _mel_spectrogram(rng: np.random.Generator) -> Array:
    wave = rng.standard_normal(AUDIO_RATE * AUDIO_SECONDS, dtype=np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(wave, FFT)[::HOP]
    spectrum = np.fft.rfft(frames * np.hanning(FFT).astype(np.float32))
    power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
    return np.log1p(power @ _mel_filters())[None]


def threaded_batches(make: Callable[[int], Array], workers: int) -> Iterator[Array]:
    """Yield batches in order, made by threads; where there is no torch."""
    with ThreadPoolExecutor(workers) as threads:
        waiting: deque[Future[Array]] = deque()
        number = 0
        while True:
            while len(waiting) < AHEAD * workers:
                waiting.append(threads.submit(make, number))
                number += 1
            yield waiting.popleft().result()
