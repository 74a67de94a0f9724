"""Hugging Face: `Trainer(…, callbacks=[ProgressCallback()])`.

A step is an optimizer step (`state.global_step`), as counted by `max_steps`. The loss is what the trainer logs, every
`logging_steps`, which spares the device another wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotenant.integrations.reporting import VALIDATION, Reporter, harmless

if TYPE_CHECKING:
    TrainerCallback = object
else:
    from transformers import TrainerCallback


class ProgressCallback(TrainerCallback):
    """Reports steps and losses of training, and batches of evaluation."""

    def __init__(self, reporter: Reporter | None = None) -> None:
        super().__init__()
        self.reporter = reporter or Reporter()

    @harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report a training step."""
        self.reporter.step(state.global_step)

    @harmless
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Report the logged loss; logs of an evaluation have none under this name."""
        if logs and "loss" in logs:
            self.reporter.step(state.global_step, logs, loss_is_new=True)

    @harmless
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report a batch of evaluation."""
        self.reporter.step(phase=VALIDATION)

    @harmless
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the last batch of an evaluation."""
        self.reporter.flush()

    @harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the last step."""
        self.reporter.flush()
