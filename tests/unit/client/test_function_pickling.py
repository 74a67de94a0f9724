"""Errors of pickling name the variable."""

from __future__ import annotations

import pickle
import sys
import threading

import pytest

import cotenant
from cotenant.client.function_pickling import pickled_call, pickled_function

LOCK = threading.Lock()


def test_a_function_comes_with_its_variables() -> None:
    factor = 3
    assert pickle.loads(pickled_function(lambda x: x * factor))(2) == 6
    assert pickle.loads(pickled_call(0, (1,), {"a": 2})) == ((1,), {"a": 2})


def test_the_error_names_the_variable() -> None:
    inner = threading.Lock()

    def closed_over() -> object:
        return inner

    def default(lock: object = inner) -> object:
        return lock

    with pytest.raises(cotenant.CannotPickle, match=r"closed_over uses what cannot be pickled: inner \(lock: "):
        pickled_function(closed_over)
    with pytest.raises(cotenant.CannotPickle, match=r"lock \(lock: "):
        pickled_function(default)


def test_the_error_names_the_argument() -> None:
    with pytest.raises(cotenant.CannotPickle, match=r"item 4: argument 1 \(lock: .*, argument key \(lock: "):
        pickled_call(4, (1, LOCK), {"key": LOCK})


def test_without_cloudpickle_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(cotenant.CotenantError, match=r"pip install 'cotenant\[python\]'"):
        pickled_function(len)
