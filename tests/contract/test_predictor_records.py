"""The ends of what predictors take from their records: each figure and text to both ends, and no further."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from cotenant import plugins
from cotenant.core.model.validation import CORES_MAX, GPU_MILLI_MAX, REPLICAS_MAX
from cotenant.core.prediction import record_validation as kept
from cotenant.policies.latency import SIZE_MAX

Path = tuple[str | int, ...]

RATE = (kept.RATE_MIN_PER_SECOND, kept.RATE_MAX_PER_SECOND)
SECONDS = (kept.RATE_MIN_PER_SECOND, kept.SECONDS_MAX)
CORES, CORES_FROM_1, NODES = (0, CORES_MAX), (1, CORES_MAX), (1, kept.NODES_MAX)
REPLICAS, GPU_MILLI = (1, REPLICAS_MAX), (0, GPU_MILLI_MAX * REPLICAS_MAX)
STEPS, LOSS = (0.0, float(kept.STEPS_MAX)), (-kept.LOSS_MAX, kept.LOSS_MAX)

# by predictor: a valid record, the ends of its figures, and where its texts are
RECORDS: dict[str, tuple[dict[str, Any], dict[Path, tuple[float, float]], list[Path]]] = {
    "history": (
        {"key": ["ann", "bert", "1000", "1"], "runs": [10.0], "rates": [["", 4, 1, [2.0]]]},
        {
            ("runs", 0): SECONDS,
            ("rates", 0, 1): CORES,
            ("rates", 0, 2): NODES,
            ("rates", 0, 3, 0): RATE,
            ("key", 2): GPU_MILLI,
            ("key", 3): REPLICAS,
        },
        [("key", 0), ("key", 1), ("rates", 0, 0)],
    ),
    "latency": (
        {"key": ["ann", "gnmt"], "batches": [[1000, 4, "", [[1, 1.0]]]]},
        {
            ("batches", 0, 0): GPU_MILLI,
            ("batches", 0, 1): CORES,
            ("batches", 0, 3, 0, 0): (1, SIZE_MAX),
            ("batches", 0, 3, 0, 1): SECONDS,
        },
        [("key", 0), ("key", 1), ("batches", 0, 2)],
    ),
    "loss-curve": (
        {
            "key": ["j1"],
            "user": "ann",
            "step": 2,
            "wildness": 0.0,
            "rates": [[4, "", [2.0]]],
            "cells": [[1.0, 2.0, 1]],
        },
        {
            ("step",): (0, kept.STEPS_MAX),
            ("wildness",): (0.0, kept.LOSS_MAX),
            ("rates", 0, 0): CORES,
            ("rates", 0, 2, 0): RATE,
            ("cells", 0, 0): STEPS,
            ("cells", 0, 1): LOSS,
            ("cells", 0, 2): (1, kept.STEPS_MAX),
        },
        [("key", 0), ("user",), ("rates", 0, 1)],
    ),
    "parameter-server": (
        {"key": ["ann", "vgg"], "rates": [["", 1, 1, 4, 4, 1.0, [2.0]]]},
        {
            ("rates", 0, 1): REPLICAS,
            ("rates", 0, 2): REPLICAS,
            ("rates", 0, 3): CORES,
            ("rates", 0, 4): CORES,
            ("rates", 0, 5): (0.0, float(kept.GPUS_MAX)),
            ("rates", 0, 6, 0): RATE,
        },
        [("key", 0), ("key", 1), ("rates", 0, 0)],
    ),
    "scaling": (
        {"key": ["ann", "vgg"], "rates": [["", kept.GPUS_MAX, 1, False, 4, [2.0]]]},
        {
            ("rates", 0, 1): (1, kept.GPUS_MAX),
            ("rates", 0, 2): NODES,
            ("rates", 0, 4): CORES_FROM_1,
            ("rates", 0, 5, 0): RATE,
        },
        [("key", 0), ("key", 1), ("rates", 0, 0)],
    ),
    "xiao-piecewise": (
        {"key": ["ann", "vgg", "1000", "1"], "rates": [["", "", 1, 4, [2.0]]]},
        {
            ("rates", 0, 2): NODES,
            ("rates", 0, 3): CORES_FROM_1,
            ("rates", 0, 4, 0): RATE,
            ("key", 2): GPU_MILLI,
            ("key", 3): REPLICAS,
        },
        [("key", 0), ("key", 1), ("rates", 0, 0), ("rates", 0, 1)],
    ),
}
PREDICTORS = [plugin for plugin in plugins.discover("cotenant.predictors") if plugin.name in RECORDS]


def is_taken(plugin: plugins.Plugin, record: Mapping[str, Any], path: Path, value: object) -> bool:
    """Return whether a record is restored with another value at a path; it is named otherwise."""
    changed: Any = copy.deepcopy(record)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    named = plugin.make().restore({"record": json.dumps(changed).encode()})
    assert list(named) in ([], ["record"])
    return not named


def test_all_these_predictors_are_installed() -> None:
    assert {plugin.name for plugin in PREDICTORS} == RECORDS.keys()


@pytest.mark.parametrize("plugin", PREDICTORS, ids=lambda plugin: plugin.name)
def test_a_figure_in_a_record_is_taken_to_both_ends(plugin: plugins.Plugin) -> None:
    record, ends, _ = RECORDS[plugin.name]
    for path, (least, most) in ends.items():
        for value in (least, most):
            assert is_taken(plugin, record, path, value), (path, value)
        if isinstance(least, int):
            beyond: list[object] = [least - 1, most + 1, "many", None]
        else:
            beyond = [math.nextafter(least, -math.inf), math.nextafter(most, math.inf), math.nan, "many", None]
        for wrong in beyond:
            assert not is_taken(plugin, record, path, wrong), (path, wrong)


@pytest.mark.parametrize("plugin", PREDICTORS, ids=lambda plugin: plugin.name)
def test_a_text_in_a_record_is_taken_to_its_greatest_length(plugin: plugins.Plugin) -> None:
    record, _, texts = RECORDS[plugin.name]
    for path in texts:
        assert is_taken(plugin, record, path, "x" * kept.TEXT_LENGTH_MAX), path
        assert not is_taken(plugin, record, path, "x" * (kept.TEXT_LENGTH_MAX + 1)), path


@pytest.mark.parametrize("plugin", PREDICTORS, ids=lambda plugin: plugin.name)
def test_an_allocation_without_figures_or_a_key_with_another_number_of_parts_is_no_record(
    plugin: plugins.Plugin,
) -> None:
    record = RECORDS[plugin.name][0]
    assert not is_taken(plugin, record, ("key",), [*record["key"], "more"])
    assert not is_taken(plugin, record, ("key",), record["key"][1:])
    empty: dict[str, Path] = {"history": ("rates", 0, 3), "latency": ("batches", 0, 3), "loss-curve": ("rates", 0, 2)}
    if path := empty.get(plugin.name):
        assert not is_taken(plugin, record, path, [])
