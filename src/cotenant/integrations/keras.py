"""Keras: `model.fit(…, callbacks=[ProgressCallback()])`, for Keras 3 with any backend, `tf.keras` or `tf_keras`.

A step is a training batch, counted over all epochs. The loss is Keras' own: the mean of the epoch so far.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cotenant.integrations.reporting import VALIDATION, Reporter, harmless

NAMES = ("keras", "tf_keras")


def _module() -> Any:
    """Return the Keras already in use, else the first that is installed.

    Raises:
        ImportError: none is installed.
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
    Callback = _module().callbacks.Callback


class ProgressCallback(Callback):
    """Reports steps and losses of training, and batches of validation."""

    async_safe = True  # Keras 3 need not wait for it after each batch
    _supports_tf_logs = True  # Keras 2 need not fetch each loss for it

    def __init__(self, reporter: Reporter | None = None) -> None:
        super().__init__()
        self.reporter = reporter or Reporter()
        self._first = self._seen = 0

    @harmless
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Continue counting from the previous epoch; in a resumed training, from the epochs before this process."""
        steps = (getattr(self, "params", None) or {}).get("steps")  # set by Keras
        self._first = epoch * int(steps) if steps and not self._seen else self._seen

    @harmless
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report a step; with several steps per execution `batch` is the last."""
        self._seen = self._first + batch + 1
        self.reporter.step(self._seen, logs)

    @harmless
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report a batch of validation."""
        self.reporter.step(phase=VALIDATION)

    @harmless
    def on_test_end(self, logs: Any = None) -> None:
        """Report the last batch of a validation."""
        self.reporter.flush()

    @harmless
    def on_train_end(self, logs: Any = None) -> None:
        """Report the last step."""
        self.reporter.flush()
