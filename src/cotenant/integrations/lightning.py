"""PyTorch Lightning: `Trainer(callbacks=[ProgressCallback()])`, for `lightning` or `pytorch_lightning`.

A step is an optimizer step (`trainer.global_step`), as counted by `max_steps`; the batches of the sanity check before a
training are not reported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cotenant.integrations.reporting import VALIDATION, Reporter, harmless

NAMES = ("lightning.pytorch", "pytorch_lightning")  # two packages with the same content


def _module() -> Any:
    """Return the package already in use, else the first that is installed.

    Raises:
        ImportError: neither is installed.
    """
    for name in NAMES:
        if name in sys.modules:
            return sys.modules[name]
    try:
        return import_module(NAMES[0])
    except ImportError:
        return import_module(NAMES[1])


if TYPE_CHECKING:
    Callback = object
else:
    Callback = _module().Callback


class ProgressCallback(Callback):
    """Reports steps and losses of training, and batches of validation."""

    def __init__(self, reporter: Reporter | None = None) -> None:
        super().__init__()
        self.reporter = reporter or Reporter()

    @harmless
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report a training step; `outputs` is what `training_step` returned."""
        self.reporter.step(trainer.global_step, outputs)

    @harmless
    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Report a batch of validation."""
        if not trainer.sanity_checking:
            self.reporter.step(phase=VALIDATION)

    @harmless
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the last batch of a validation."""
        self.reporter.flush()

    @harmless
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the last step."""
        self.reporter.flush()
