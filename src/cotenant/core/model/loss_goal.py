"""The loss goal of a training: when it is done, by its loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LossGoal:
    """A target loss, or a decrease too small to continue; with both, whichever comes first.

    The goal only informs predictors about the job's own stopping rule: nothing stops a job because of it. The second
    rule is that of Optimus (Peng et al., EuroSys 2018): a training has converged once its loss decreases too little
    between two checks.

    target: the loss at which the training is done, or None.
    fall_steps, fall_min: done once this many further steps lower the loss by less than this; 0 and 0.0 for no such
      rule.
    """

    target: float | None = None
    fall_steps: int = 0
    fall_min: float = 0.0

    @property
    def given(self) -> bool:
        """Whether there is a goal."""
        return self.target is not None or self.by_fall

    @property
    def by_fall(self) -> bool:
        """Whether a decrease that is too small ends the training."""
        return self.fall_steps > 0 and self.fall_min > 0


NO_GOAL = LossGoal()
