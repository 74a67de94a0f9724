"""When a training is done, by its loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LossGoal:
    """A loss to be reached, or a fall too small to go on for; where both are given, whichever comes first.

    It only tells predictors what the job itself goes by: nobody stops a job for it. The second rule is that of Optimus
    (Peng et al., EuroSys 2018): a training has converged once its loss falls too little between two looks at it.

    target: the loss at which the training is done, or None.
    fall_steps, fall_min: done once so many further steps lower the loss by less than this; 0 and 0.0 for no such rule.
    """

    target: float | None = None
    fall_steps: int = 0
    fall_min: float = 0.0

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return self.target is not None or self.by_fall

    @property
    def by_fall(self) -> bool:
        """Whether a fall too small ends the training."""
        return self.fall_steps > 0 and self.fall_min > 0


NO_GOAL = LossGoal()
