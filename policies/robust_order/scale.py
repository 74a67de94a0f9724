"""Quarter octaves: the logarithmic scale on which ages, sizes and ranks are compared, four steps for each doubling.

A number's step is read off the bits of its floating-point form: the exponent, and a table of the first bits of the
mantissa. It is the same on every machine, and several times quicker than a logarithm.
"""

from __future__ import annotations

import numpy as np

from cotenant.core.model.job_table import Floats, Ints

PER_OCTAVE = 4
_BITS = 6  # of the mantissa that count
_BEGINS: Ints = np.array([0, 12, 27, 44])  # of the steps of an octave: 1, 2^(1/4), 2^(1/2), 2^(3/4), in 64ths above 1
_SHIFT = 52 - _BITS
_EXPONENT_MAX = 64
_FIRST = (1023 - _EXPONENT_MAX) << _BITS  # the smallest number in the table, as an integer
_STEPS: Ints = (
    PER_OCTAVE * np.arange(-_EXPONENT_MAX, _EXPONENT_MAX)[:, None]
    + np.searchsorted(_BEGINS, np.arange(1 << _BITS), side="right")[None, :]
    - 1
).ravel()


def quarter_octaves(values: Floats) -> Ints:
    """Return the step of each number, which must be from 2^-64 to 2^64; that of 1.0 is 0.

    >>> quarter_octaves(np.array([1.0, 1.18, 1.19, 2.0, 0.5])).tolist()
    [0, 0, 1, 4, -4]
    """
    places: Ints = values.view(np.int64) >> _SHIFT
    places -= _FIRST
    return _STEPS.take(places)


def ends_of(steps: Ints) -> Floats:
    """Return the number at which each step ends.

    >>> ends_of(np.array([0, 3])).tolist()
    [1.1875, 2.0]
    """
    octave, step = np.divmod(steps + 1, PER_OCTAVE)
    return np.ldexp(1.0 + _BEGINS[step] / (1 << _BITS), octave)


def rounded_quarter_octaves(logs: Floats) -> Ints:
    """Return the nearest step of numbers given by their natural logarithms.

    >>> rounded_quarter_octaves(np.array([0.0, np.log(8.0)])).tolist()
    [0, 12]
    """
    steps: Ints = np.rint(logs * (PER_OCTAVE / np.log(2.0))).astype(np.int64)
    return steps
