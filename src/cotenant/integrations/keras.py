"""Keras: `model.fit(…, callbacks=[ProgressCallback()])`, of Keras 3 with any backend, of `tf.keras` or of `tf_keras`.

A step is a batch of training, over all epochs. The loss is Keras' own: the mean of the epoch so far.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cotenant.integrations.reporting import VALIDATION, Reporter, harmless

NAMES = ("keras", "tf_keras")


def _module() -> Any:
    """The Keras that is in use already, else the first that is installed.

    Raises:
        ImportError: none is.
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
    """Tells steps and losses of training, and batches of validation."""

    async_safe = True  # Keras 3 need not wait for it after each batch
    _supports_tf_logs = True  # Keras 2 need not fetch each loss for it

    def __init__(self, reporter: Reporter | None = None) -> None:
        super().__init__()
        self.reporter = reporter or Reporter()
        self._first = self._seen = 0

    @harmless
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count on from the epoch before; where a training was resumed, from the epochs before this process."""
        steps = (getattr(self, "params", None) or {}).get("steps")  # which Keras sets
        self._first = epoch * int(steps) if steps and not self._seen else self._seen

    @harmless
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tell a step; of several in one execution `batch` is the last."""
        self._seen = self._first + batch + 1
        self.reporter.step(self._seen, logs)

    @harmless
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tell a batch of validation."""
        self.reporter.step(phase=VALIDATION)

    @harmless
    def on_test_end(self, logs: Any = None) -> None:
        """Tell the last batch of a validation."""
        self.reporter.flush()

    @harmless
    def on_train_end(self, logs: Any = None) -> None:
        """Tell the last step."""
        self.reporter.flush()
