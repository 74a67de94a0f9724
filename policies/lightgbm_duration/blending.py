"""Blends the quantiles of several models and calibrates their intervals, from one outcome to the next.

- *Weights*: each model's recent pinball loss, separately for each quantile and each group of jobs, decides its weight:
  an exponentially weighted average (Vovk's aggregation with forgetting; Cesa-Bianchi & Lugosi 2006 [P]). Clusters
  change their habits within a day; which model was best last week says little.
- *Offsets*: the ends of an interval move outwards after each miss and inwards, by less, after each hit, so that in the
  long run the right share of jobs falls outside, whatever the models do (adaptive conformal inference: Gibbs & Candès,
  NeurIPS 2021; tracking the quantile itself: Angelopoulos, Candès & Tibshirani, NeurIPS 2023 [P]). They are measured in
  widths of the interval, so that one offset serves well-known and unknown jobs alike [R].

Memory is bounded: some figures for each group, and the least recently used group is dropped.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cotenant.core.model.job_table import Floats

SHARES = np.array([0.1, 0.5, 0.9])  # the predicted quantiles
GROUPS_MAX = 64
FORGET = 1 / 500  # share of the average loss that one outcome replaces
SHARPNESS = 20.0  # a loss larger by 1 % costs a model this percentage of its weight
STEP = 0.03  # widths by which an interval's end moves when every outcome misses it
WIDTH_MIN = 0.02  # logarithms of seconds; the width for exactly known jobs
OFFSET_MIN, OFFSET_MAX = -0.1, 20.0  # widths: the first jobs to end are short, and must not narrow it much
LOSS_MAX = 1e6  # logarithms of seconds; larger than the distance of any two times
OUTLIVED = 0.01  # of jobs; a job that has run longer than all others is no longer predicted


@dataclass(slots=True)
class _Group:
    losses: Floats  # by model and quantile
    offsets: Floats = field(default_factory=lambda: np.zeros(2))  # outwards, below and above
    count: int = 0


class Blend:
    """Weights and offsets by group.

    >>> blend = Blend(models=2)
    >>> right, wrong = [1.0, 2.0, 3.0], [5.0, 6.0, 7.0]
    >>> for _ in range(50):
    ...     blend.learn("a", np.array([right, wrong]), outcome=2.0)
    >>> blend.of(["a"], np.array([[right, wrong]])).round(1)[0, 1]
    np.float64(2.0)
    """

    def __init__(self, models: int) -> None:
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._fresh = _Group(np.zeros((models, len(SHARES))))
        self.changed = False

    def of(self, groups: Sequence[str], told: Floats) -> Floats:
        """Blend quantiles, (jobs, models, quantiles), into (jobs, quantiles); a model with NaN has no weight."""
        known = [self._groups.get(group, self._fresh) for group in groups]
        if len(set(groups)) == 1:
            known = known[:1]
        losses = np.array([group.losses for group in known])
        offsets = np.array([group.offsets for group in known])
        return self._blended(told, losses, offsets)

    @staticmethod
    def _blended(told: Floats, losses: Floats, offsets: Floats) -> Floats:
        silent = np.isnan(told)
        least = np.min(np.where(silent, np.inf, losses), axis=1, keepdims=True)
        weights = np.where(silent, 0.0, np.exp(-SHARPNESS * (losses / np.maximum(least, 1e-6) - 1)))
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
        blended = np.sort(np.where(silent, 0.0, told * weights).sum(axis=1), axis=1)
        below = np.maximum(blended[:, 1] - blended[:, 0], WIDTH_MIN)
        above = np.maximum(blended[:, 2] - blended[:, 1], WIDTH_MIN)
        low = np.minimum(blended[:, 0] - offsets[:, 0] * below, blended[:, 1])
        high = np.maximum(blended[:, 2] + offsets[:, 1] * above, blended[:, 1])
        return np.column_stack([low, blended[:, 1], high])

    def learn(self, group: str, told: Floats, outcome: float) -> None:
        """Learn from the outcome of a job for which models predicted these quantiles, (models, quantiles)."""
        state = self._touch(group)
        low, _, high = self.of([group], told[None])[0]
        misses = np.array([outcome < low, outcome > high]) - SHARES[0]
        state.offsets = np.clip(state.offsets + STEP * misses, OFFSET_MIN, OFFSET_MAX)
        short = outcome - told
        losses = np.maximum(SHARES * short, (SHARES - 1) * short)
        state.count += 1
        share = max(FORGET, 1 / state.count)
        known = ~np.isnan(losses)
        state.losses = np.where(
            known, state.losses + share * (np.where(known, losses, 0.0) - state.losses), state.losses
        )
        self.changed = True

    def _touch(self, group: str) -> _Group:
        state = self._groups.setdefault(group, _Group(self._fresh.losses.copy()))
        self._groups.move_to_end(group)
        if len(self._groups) > GROUPS_MAX:
            self._groups.popitem(last=False)
        return state

    def dump(self) -> bytes:
        """Encode every group, the least recently used first."""
        self.changed = False
        return json.dumps(
            {name: [group.losses.tolist(), group.offsets.tolist(), group.count] for name, group in self._groups.items()}
        ).encode()

    def restore(self, content: bytes) -> None:
        """Restore dumped groups.

        Raises:
            ValueError: the content is invalid; nothing was restored.
        """
        try:
            groups = {
                str(name): _Group(np.array(losses, dtype=float), np.array(offsets, dtype=float), int(count))
                for name, (losses, offsets, count) in json.loads(content).items()
            }
        except (TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"invalid record of a blend: {error}") from None
        for name, group in groups.items():
            sound = group.losses.shape == self._fresh.losses.shape and group.offsets.shape == (2,) and group.count >= 0
            known = sound and (group.losses >= 0).all() and (group.losses <= LOSS_MAX).all()
            if not (known and (group.offsets >= OFFSET_MIN).all() and (group.offsets <= OFFSET_MAX).all()):
                raise ValueError(f"the blend of {name!r} has invalid figures")
        self._groups = OrderedDict(groups)


def remaining(quantiles: Floats, so_far: Floats) -> Floats:
    """Return the quantiles of the remaining time in seconds, given those of the run time and the time run so far.

    Between and beyond its three quantiles a run time is treated as log-normal, with separate spreads below and above
    the median. The remaining time of a job that has outlived nearly all expected run times is NaN.

    >>> remaining(np.log([[50.0, 100.0, 200.0]]), np.array([0.0])).round(6).tolist()
    [[50.0, 100.0, 200.0]]
    """
    begun = so_far > 0
    rest: Floats = np.exp(quantiles) - np.where(begun, np.nan, 0.0)[:, None]
    if begun.any():
        rest[begun] = _rest(quantiles[begun], so_far[begun])
    return rest


def _rest(quantiles: Floats, so_far: Floats) -> Floats:
    from scipy.special import ndtr, ndtri  # takes a tenth of a second; only for queries about running jobs

    low, middle, high = quantiles.T
    unit = float(ndtri(SHARES[2]))
    below, above = np.maximum(middle - low, 1e-6) / unit, np.maximum(high - middle, 1e-6) / unit
    now = np.log(so_far)
    passed = ndtr((now - middle) / np.where(now < middle, below, above))
    share = passed[:, None] + SHARES * (1 - passed[:, None])
    normal = ndtri(share)
    whole = np.exp(middle[:, None] + normal * np.where(normal < 0, below[:, None], above[:, None]))
    rest: Floats = np.where(passed[:, None] > 1 - OUTLIVED, np.nan, np.maximum(0.0, whole - so_far[:, None]))
    return rest
