"""Decoded specs are cached within a memory limit, whatever the jobs look like."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice

import pytest
from tests.unit.services.mesh import spec

from cotenant.codec import specs as specs_module
from cotenant.codec.spec_cache import BYTES_MAX, SPEC_BYTES_MAX, SpecCache, estimated_bytes
from cotenant.services.placement.cluster import request_decoding as codec_module
from cotenant.services.predictor import codec
from cotenant.v1 import job_pb2

MIB = 1 << 20
FRESH = count(1)  # what another test has cached is not counted here
SPECS = 1_600  # 44 MiB of variables, 21 MiB of labels


def task(index: int) -> job_pb2.JobSpec:
    """Return a unique job of an array."""
    one = spec(gpus=1, cores=1)
    one.array_task.index = index
    return one


def text(index: int) -> job_pb2.JobSpec:
    one = task(index)
    one.environment["FILL"] = "x" * 1_500
    return one


def variables(index: int) -> job_pb2.JobSpec:
    one = task(index)
    one.environment.update({f"V{number}": f"{number + 300}" for number in range(150)})
    return one


def labels(index: int) -> job_pb2.JobSpec:
    one = task(index)
    one.labels.update({f"label-{number}": f"value-{number}" for number in range(64)})
    return one


def argued(index: int) -> job_pb2.JobSpec:
    one = task(index)
    one.command.extend([f"w{number}" for number in range(380)])
    return one


def team(index: int) -> job_pb2.JobSpec:
    one = task(index)
    del one.roles[:]
    for number in range(16):
        one.roles.add(name=f"role{number}", replicas=1).resources.gpu_milli = 1000
    return one


def waiting(index: int) -> job_pb2.JobSpec:
    one = task(index)
    for number in range(100):
        one.dependencies.add(id=f"job{number:05}", condition=1)
    return one


KINDS = (task, text, variables, labels, argued, team, waiting)


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the bytes allocated within the context and still in use."""
    gc.collect()
    tracemalloc.start()

    def held() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    try:
        yield held
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimated_size_of_a_decoded_spec_is_close(kind: Callable[[int], job_pb2.JobSpec]) -> None:
    specs = [kind(index) for index in range(200)]
    cache = SpecCache(specs_module._spec_from_wire, spec_bytes_max=1 << 20)
    with traced() as held:
        for one in specs:
            cache(one)
        taken = held()
    estimated = sum(estimated_bytes(one, one.ByteSize()) for one in specs)
    assert cache.bytes == estimated
    assert taken / 1.15 <= estimated <= 2 * taken


@pytest.mark.deep
@pytest.mark.parametrize(
    ("decode", "bytes_max"),
    [
        (specs_module.spec_from_wire, BYTES_MAX),
        (codec_module._read, BYTES_MAX),
        (codec.decoded_spec_of, codec.SPECS_BYTES_MAX),
    ],
)
def test_caches_of_small_specs_stay_within_their_limit(
    decode: Callable[[job_pb2.JobSpec], object], bytes_max: int
) -> None:
    kind = labels if decode is codec.decoded_spec_of else variables
    assert kind(0).ByteSize() <= SPEC_BYTES_MAX
    most = 2 * BYTES_MAX if decode is codec_module._read else bytes_max  # it decodes by way of the first
    with traced() as held:
        for index in islice(FRESH, SPECS):
            decode(kind(index))
        assert held() < most + 4 * MIB


def test_equal_specs_are_one_object_and_the_least_recently_used_is_dropped_first() -> None:
    decoded: list[int] = []

    def decode(one: job_pb2.JobSpec) -> int:
        decoded.append(one.array_task.index)
        return one.array_task.index

    size = estimated_bytes(task(1), task(1).ByteSize())
    cache = SpecCache(decode, bytes_max=2 * size)
    for index in (1, 2, 1, 3, 1, 2):
        assert cache(task(index)) == index
    assert decoded == [1, 2, 3, 2]
    assert (len(cache), cache.bytes) == (2, 2 * size)
    cache.cache_clear()
    assert (len(cache), cache.bytes) == (0, 0)


def test_a_large_spec_is_decoded_but_not_cached() -> None:
    cache = SpecCache(lambda one: one.name)
    large = task(1)
    large.environment["FILL"] = "x" * SPEC_BYTES_MAX
    assert cache(large) == "job"
    assert len(cache) == 0


def test_an_error_is_not_cached() -> None:
    def decode(one: job_pb2.JobSpec) -> str:
        raise ValueError("spec.name is missing")

    cache = SpecCache(decode)
    for _ in range(2):
        with pytest.raises(ValueError, match="missing"):
            cache(task(1))
    assert len(cache) == 0
