"""Recognizes the model that a job trains by its name: users, traces and profiles spell the same model in many ways."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

# Family, kind of work, and spellings; the first spelling that the name begins with counts.
_SPELLINGS: tuple[tuple[str, str, str], ...] = (
    ("resnet50", "vision", "resnet50 res50"),
    ("resnet18", "vision", "resnet18 res18"),
    ("resnet", "vision", "resnet resnext"),
    ("alexnet", "vision", "alexnet"),
    ("mobilenet", "vision", "mobilenet"),
    ("shufflenet", "vision", "shufflenet"),
    ("googlenet", "vision", "googlenet inception1 inceptionv1"),
    ("inception", "vision", "inception"),
    ("overfeat", "vision", "overfeat"),
    ("lenet", "vision", "lenet"),
    ("vgg", "vision", "vgg"),
    ("yolo", "vision", "yolo"),
    ("densenet", "vision", "densenet"),
    ("squeezenet", "vision", "squeezenet"),
    ("cyclegan", "vision", "cyclegan"),
    ("vae", "", "vae"),
    ("deepspeech", "speech", "deepspeech"),
    ("m5", "speech", "m5"),
    ("wavenet", "speech", "wavenet"),
    ("bert", "language", "bert roberta"),
    ("gnmt", "language", "gnmt"),
    ("gpt", "language", "gpt"),
    ("transformer", "language", "transformer"),
    ("bidaf", "language", "biattflow bidaf"),
    ("lstm", "language", "lstm languagemodel lm"),
    ("a3c", "", "a3c"),
    ("recommendation", "", "recommendation recoder"),
)
_FAMILIES = tuple((spelt, family, kind) for family, kind, spellings in _SPELLINGS for spelt in spellings.split())
FAMILIES = tuple(family for family, _, _ in _SPELLINGS)
_BATCH = re.compile(r"\(\s*batch size (\d+)\s*\)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Model:
    """A model family, its kind of work (`vision`, `language`, `speech` or ""), and its batch size if named."""

    family: str
    kind: str
    batch: int | None = None


@lru_cache(maxsize=4096)
def model_of(tag: str) -> Model | None:
    """Return the model that a name stands for; None if it is unknown.

    >>> model_of("ResNet-50 (batch size 32)")
    Model(family='resnet50', kind='vision', batch=32)
    >>> model_of("gpt2").family, model_of("my own")
    ('gpt', None)
    """
    batch = _BATCH.search(tag)
    name = re.sub(r"[^a-z0-9]", "", _BATCH.sub("", tag).lower())
    for spelt, family, kind in _FAMILIES:
        if name == spelt or (name.startswith(spelt) and len(spelt) > 2):
            return Model(family, kind, int(batch[1]) if batch else None)
    return None
