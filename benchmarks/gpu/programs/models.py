"""Models in torch for the training programs: ResNet-50, a small transformer, and a small convolutional network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmarks.gpu.programs.inputs import MELS, VOCABULARY, Array
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

CLASSES = 1000
BLOCKS, SMALL_BLOCKS = (3, 4, 6, 3), (1, 1, 1, 1)  # of ResNet-50 (He et al., CVPR 2016)
WIDTH, LAYERS, HEADS = 512, 8, 8
SMALL_WIDTH, SMALL_LAYERS = 64, 2
AUDIO_CHANNELS, SMALL_AUDIO_CHANNELS = 128, 16


class Bottleneck(nn.Module):  # type: ignore[misc]  # torch is not installed where types are checked
    """A block of ResNet-50."""

    def __init__(self, inside: int, planes: int, stride: int) -> None:
        super().__init__()
        outside = 4 * planes
        self.body = nn.Sequential(
            *_convolution(inside, planes, 1), nn.ReLU(inplace=True),
            *_convolution(planes, planes, 3, stride), nn.ReLU(inplace=True),
            *_convolution(planes, outside, 1),
        )  # fmt: skip
        same = stride == 1 and inside == outside
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inside, outside, 1, stride))

    def forward(self, x: Any) -> Any:
        """Apply the block."""
        return torch.relu(self.body(x) + self.shortcut(x))


def _convolution(inside: int, outside: int, size: int, stride: int = 1) -> list[Any]:
    return [nn.Conv2d(inside, outside, size, stride, size // 2, bias=False), nn.BatchNorm2d(outside)]


def _resnet(blocks: tuple[int, ...]) -> Any:
    layers: list[Any] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(Bottleneck(inside, 64 << stage, 2 if stage and not number else 1))
            inside = 4 * (64 << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, CLASSES))


class Transformer(nn.Module):  # type: ignore[misc]  # torch is not installed where types are checked
    """A small language model."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding, self.layers = nn.Embedding(VOCABULARY, width), nn.TransformerEncoder(layer, layers)
        self.output = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        """Return the scores of the next token at each place."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.output(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


def _audio(channels: int) -> Any:
    return nn.Sequential(
        *_convolution(1, channels, 3, 2), nn.ReLU(),
        *_convolution(channels, channels, 3, 2), nn.ReLU(),
        *_convolution(channels, channels, 3, 2), nn.ReLU(),
        nn.AdaptiveAvgPool2d((1, MELS // 8)), nn.Flatten(), nn.Linear(channels * MELS // 8, CLASSES),
    )  # fmt: skip


def build(model: str, *, small: bool) -> Any:
    """Return a model."""
    if model == "image":
        return _resnet(SMALL_BLOCKS if small else BLOCKS)
    if model == "text":
        return Transformer(SMALL_WIDTH if small else WIDTH, SMALL_LAYERS if small else LAYERS)
    return _audio(SMALL_AUDIO_CHANNELS if small else AUDIO_CHANNELS)


def training_step(model: str, device: str, *, small: bool, echo: int) -> Callable[[Any], float]:
    """Return a function that trains on a batch `echo` times, in bf16 on a GPU, and returns the loss once it is done."""
    network = build(model, small=small).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Any) -> float:
        values = batch.to(device, non_blocking=True)
        inputs, labels = _inputs_and_labels(model, values)
        for _ in range(echo):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                scores = network(inputs)
                loss = nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())
            loss.backward()
            optimizer.step()
        return float(loss)  # waits for the device

    return step


def _inputs_and_labels(model: str, values: Any) -> tuple[Any, Any]:
    if model == "text":
        return values[:, :-1], values[:, 1:]
    labels = torch.zeros(len(values), dtype=torch.long, device=values.device)
    return (values.permute(0, 3, 1, 2).float() / 255 if model == "image" else values), labels


class _Batches(IterableDataset):  # type: ignore[misc]  # torch is not installed where types are checked
    def __init__(self, make: Callable[[int], Array]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, step = (worker.id, worker.num_workers) if worker else (0, 1)
        while True:
            yield torch.from_numpy(self._make(number))
            number += step


def batches(make: Callable[[int], Array], workers: int, device: str) -> Iterator[Any]:
    """Return batches made by worker processes."""
    loader = DataLoader(
        _Batches(make), batch_size=None, num_workers=workers, prefetch_factor=2, pin_memory=device == "cuda"
    )
    return iter(loader)
