"""Gittins' index by relative age: run time so far over the typical run time of such jobs.

The hazard at each step of relative age is Kaplan and Meier's estimate (JASA 1958): jobs that ended there, over jobs
that got there. Jobs that have not ended are counted up to their age (they are censored). Where few jobs are left to
judge by, the hazard per second stays as it was: then age says nothing about the end, and the order is first in, first
out.

From hazards follows the expected run time per end, 1 / Gittins' index:
    min over Δ of E[min(rest, Δ)] / P(rest ≤ Δ)
A distribution that is narrow around the typical run time gives the remaining run time (shortest remaining first), a
falling hazard gives something that grows with age (least attained service first), a constant one the same for all ages
(first in, first out). Gittins' rule minimizes the mean response time of one server if run times follow the distribution
(Scully et al., arXiv 1907.10792).
"""

from __future__ import annotations

import numpy as np

from cotenant.core.model.job_table import Floats, Ints
from cotenant.policies.robust_order.scale import PER_OCTAVE

LOWEST, HIGHEST = -13 * PER_OCTAVE, 10 * PER_OCTAVE  # steps of relative age; jobs beyond count at the ends
STEPS = HIGHEST - LOWEST + 1
_EDGES: Floats = np.exp2(np.arange(LOWEST, HIGHEST + 2) / PER_OCTAVE)
_EDGES[0] = 0.0
_LENGTHS: Floats = np.diff(_EDGES)
_KERNEL: Floats = np.array([1.0, 2.0, 3.0, 2.0, 1.0]) / 9
AT_RISK_MIN = 8.0  # where fewer jobs are left, the hazard per second stays as it was
RATE_STEPS = 9  # over which it is taken
HAZARD_MIN, HAZARD_MAX = 1e-6, 0.999


def clipped_steps(steps: Ints) -> Ints:
    """Return steps of relative age as places in the tables, from 0 to `STEPS` - 1."""
    places = steps - LOWEST
    np.maximum(places, 0, out=places)
    return np.minimum(places, STEPS - 1, out=places)


def counted(steps: Ints) -> Floats:
    """Return the number of jobs at each step of relative age."""
    return np.bincount(clipped_steps(steps), minlength=STEPS).astype(np.float64)


def smoothed(ended: Floats) -> Floats:
    """Return ends spread over neighboring steps."""
    return np.convolve(ended, _KERNEL, mode="same")


def seconds_per_end(ended: Floats, censored: Floats) -> Floats:
    """Return for each step of relative age 1 / Gittins' index, in multiples of the typical run time.

    >>> narrow, none = counted(np.zeros(50, dtype=np.int64)), np.zeros(STEPS)
    >>> at = clipped_steps(np.array([-8, -4, -1]))
    >>> seconds_per_end(narrow, none)[at].round(2).tolist()  # of jobs that end near 1, at ages of a quarter and more
    [0.85, 0.6, 0.25]
    """
    hazard, thin, rate = _hazard(ended, censored)
    survival = np.concatenate([[1.0], np.cumprod(1 - hazard)])
    alive = np.maximum(survival[:-1, None], 1e-300)
    lasts = _LENGTHS * (1 - hazard / 2)  # of a job that begins the step, within it
    lasts[thin:] = hazard[thin:] / rate
    done = np.triu(1 - survival[None, 1:] / alive)
    taken = np.cumsum(np.triu(survival[None, :-1] / alive) * lasts, axis=1)
    seconds: Floats = 1 / np.maximum(np.max(done / np.maximum(taken, 1e-300), axis=1), 1e-12)
    seconds[thin:] = 1 / rate
    return seconds


def _hazard(ended: Floats, censored: Floats) -> tuple[Floats, int, float]:
    """Return the probability that a job which begins a step ends within it.

    Also the first step at which few jobs are left, and the rate at which they end from there on.
    """
    at_risk = np.cumsum((ended + censored)[::-1])[::-1] - censored / 2
    hazard: Floats = np.clip(ended / np.maximum(at_risk, 1e-9), HAZARD_MIN, HAZARD_MAX)
    few = np.flatnonzero(at_risk < AT_RISK_MIN)
    thin = max(int(few[0]), 1) if len(few) else STEPS
    late = slice(max(0, thin - RATE_STEPS), thin)
    rate = max(float(ended[late].sum()), 0.5) / max(float((at_risk[late] * _LENGTHS[late]).sum()), 1e-9)
    hazard[thin:] = np.clip(1 - np.exp(-rate * _LENGTHS[thin:]), HAZARD_MIN, HAZARD_MAX)
    return hazard, thin, rate
