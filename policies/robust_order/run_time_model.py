"""Typical run times: a linear model of the logarithm of run time, fitted to the last jobs that ended.

Two models of this kind are kept. One knows the GPUs of a job only, the other also the prediction of its run time. Both
begin with a prior that counts like a number of jobs, so that few ends move them little.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from cotenant.core.model.job_table import Floats

SIGNIFICANT_DIGITS = 9  # of coefficients, so that the last bits of exp and log change nothing
WEIGHTS = np.array([1.0, 2.0, 4.0])  # of the prior: intercept, GPUs, prediction
LOG_RUN_TIME_MAX = math.log(1e9)


class RunTimeModel:
    """log(run time) = features · coefficients + residual. The first feature is 1, the second log(GPUs).

    `worth`: the prior counts like so many jobs. At most the last `window` ended jobs are remembered.

    >>> model = RunTimeModel(prior=(math.log(7200), 0.0), window=100, worth=10)
    >>> for _ in range(90):
    ...     model.learn((1.0, 0.0), math.log(720))
    >>> model.fit()
    >>> round(math.exp(float(model.typical(np.array([[1.0, 0.0]]))[0])))
    906
    """

    def __init__(self, prior: Sequence[float], window: int, worth: float) -> None:
        self._prior: Floats = np.array(prior)
        self._worth = worth
        self._ended: deque[tuple[tuple[float, ...], float]] = deque(maxlen=window)
        self.coefficients: Floats = self._prior.copy()

    def __len__(self) -> int:
        return len(self._ended)

    def learn(self, features: tuple[float, ...], log_run_time: float) -> None:
        """Remember a job that ended; it counts from the next fit on."""
        self._ended.append((features, log_run_time))

    def squared_error(self, features: tuple[float, ...], log_run_time: float) -> float:
        """Return how wrong the model is about a job."""
        pairs = zip(self.coefficients.tolist(), features, strict=True)
        typical = math.fsum(coefficient * feature for coefficient, feature in pairs)
        return (log_run_time - typical) * (log_run_time - typical)

    def fit(self) -> None:
        """Fit the coefficients to the remembered jobs and the prior: ridge regression."""
        features, log_run_times = self.ended()
        middle = np.zeros(len(self._prior))
        if len(self._prior) > 2 and len(features):
            middle[2] = features[:, 2].mean()  # slope and intercept shrink independently of each other
        prior = self._prior.copy()
        prior[0] += float(middle @ self._prior)
        centered = features - middle
        ridge = self._worth * np.diag(WEIGHTS[: len(prior)])
        found = np.linalg.solve(centered.T @ centered + ridge, centered.T @ log_run_times + ridge @ prior)
        found[0] -= float(middle @ found)
        self.coefficients = np.array([float(f"{one:.{SIGNIFICANT_DIGITS}g}") for one in found.tolist()])

    def ended(self) -> tuple[Floats, Floats]:
        """Return the features and the logarithms of the run times of the remembered jobs."""
        features = np.array([one for one, _ in self._ended]).reshape(-1, len(self._prior))
        return features, np.array([log_run_time for _, log_run_time in self._ended])

    def typical(self, features: Floats) -> Floats:
        """Return the logarithms of typical run times, from 1 s up."""
        found: Floats = np.clip(features @ self.coefficients, 0.0, LOG_RUN_TIME_MAX)
        return found
