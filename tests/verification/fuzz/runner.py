"""Runs targets on the inputs of a seed: measures each, detects unexpected errors, and minimizes inputs of findings."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import mmap
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, cache
from pathlib import Path
from random import Random
from types import FrameType

import structlog
from tests.verification.fuzz import loop_lag
from tests.verification.fuzz.mutator import BYTES_MAX, Mutator
from tests.verification.fuzz.targets import Target

from cotenant.codec.spec_cache import SpecCache

FINDINGS_MAX = 20  # per target
SHRINKS_MAX = 400
WATCHED_EVERY = 500
SETTLED_SHARE = 0.3  # share of the inputs after which memory should be stable
MEASURED_INPUTS_MIN = 50  # growth of fewer says nothing, and measuring takes as long as hundreds of them
GROWTH_BYTES_MAX = 24 << 20
HEAD = 8
WAITING_FACTOR = 6  # an input may wait this much longer than it may compute: the machine may have other work


class Hung(BaseException):
    """An input took too long; not an `Exception`, so that no handler catches it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A violation, with an input of minimal size."""

    target: str
    what: str
    data: bytes

    def __str__(self) -> str:
        shown = repr(self.data) if len(self.data) <= 300 else f"{self.data[:300]!r}… ({len(self.data)} bytes)"
        return f"{self.target}: {self.what}\n    {shown}"


@dataclass(slots=True)
class Outcome:
    """The outcome of a target."""

    target: str
    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    grown_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)


class LastInput:
    """The current input, readable by the parent after a crash."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, HEAD + BYTES_MAX * 8)

    def note(self, data: bytes) -> None:
        """Record the next input."""
        data = data[: BYTES_MAX * 8]
        self._memory[:HEAD] = len(data).to_bytes(HEAD, "big")
        self._memory[HEAD : HEAD + len(data)] = data

    def last(self) -> bytes:
        """Return the input recorded last."""
        return self._memory[HEAD : HEAD + int.from_bytes(self._memory[:HEAD], "big")]


def run(
    target: Target,
    inputs: int,
    seed: int | str,
    directory: Path,
    last_input: LastInput | None = None,
    watch: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Run a number of inputs. The inputs of a seed do not depend on their number."""
    outcome = Outcome(target.name)
    kinds: set[str] = set()
    begun = time.monotonic()
    settled = 0
    with quiet():
        prepared = target.prepare(directory)
        mutator = Mutator(Random(f"{target.name} {seed}"), prepared.seeds, prepared.words)
        for seed_input in prepared.seeds:
            what = _what(target, prepared.run, prepared.pack(seed_input), outcome)
            if what:
                outcome.findings.append(Finding(target.name, f"a valid input: {what}", seed_input))
        while outcome.inputs < inputs and len(outcome.findings) < FINDINGS_MAX:
            data = prepared.pack(mutator.draw())
            if last_input:
                last_input.note(data)
            if (what := _what(target, prepared.run, data, outcome)) and (kind := _kind(what)) not in kinds:
                kinds.add(kind)
                small = _smaller(data, _fails_the_same_way(target, prepared.run, kind))
                outcome.findings.append(Finding(target.name, what, small))
            outcome.inputs += 1
            if inputs >= MEASURED_INPUTS_MIN and outcome.inputs == int(inputs * SETTLED_SHARE):
                settled = memory_bytes()
            if outcome.inputs % WATCHED_EVERY == 0:
                outcome.seconds = time.monotonic() - begun
                watch(outcome)
    outcome.seconds = time.monotonic() - begun
    outcome.grown_bytes = memory_bytes() - settled if settled else 0
    return outcome


def _fails_the_same_way(target: Target, run: Callable[[bytes], None], kind: str) -> Callable[[bytes], bool]:
    return lambda data: _kind(_what(target, run, data, None)) == kind


def _what(target: Target, run: Callable[[bytes], None], data: bytes, outcome: Outcome | None) -> str:
    """Run one input; return "" if it was accepted or refused with a message."""
    seconds = 0.0
    try:
        with _limit(target.seconds_max):
            if target.in_loop:
                seconds = _held_seconds(run, data)
            else:
                run(data)
    except target.errors as error:
        if outcome:
            outcome.refused += 1
        return "" if str(error).strip() else f"{type(error).__name__} without a message"
    except Hung as error:
        return f"hung: {error}"
    except (Exception, RecursionError, MemoryError) as error:
        return _describe(error)
    if loop_lag.is_too_long(seconds):
        return f"held the loop: {seconds * 1000:.0f} ms of CPU time"
    return ""


def _held_seconds(run: Callable[[bytes], None], data: bytes) -> float:
    """Return how long an input occupies a thread: the minimum of two runs, since the first may import modules.

    Raises:
        Exception: whatever the input raises, unless it took too long for that.
    """
    error: Exception | None = None

    def attempt() -> None:
        nonlocal error
        try:
            run(data)
        except Exception as raised:
            error = raised

    seconds = loop_lag.cpu_seconds(attempt)
    if seconds > loop_lag.bound_seconds():
        seconds = min(seconds, loop_lag.cpu_seconds(attempt))
    if error is not None and (seconds <= loop_lag.bound_seconds() or isinstance(error, AssertionError)):
        raise error
    return seconds


def _describe(error: BaseException) -> str:
    """Describe an error and its innermost places in our code."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "/fuzz/" not in frame.filename]
    return f"{type(error).__name__}: {str(error)[:120]} [{' '.join(ours[-3:])}]"


def _kind(what: str) -> str:
    """Return the identity of a finding: the error and where it was raised, without the numbers in its text."""
    return what.partition(":")[0] + what[what.rfind("[") :] if what else ""


def _smaller(data: bytes, still: Callable[[bytes], bool]) -> bytes:
    """Remove ever smaller parts as long as it still fails; bounded in tries."""
    tries, size = 0, max(1, len(data) // 2)
    while size and tries < SHRINKS_MAX:
        at = 0
        while at < len(data) and tries < SHRINKS_MAX:
            tries += 1
            shorter = data[:at] + data[at + size :]
            if still(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Interrupt inputs that take too much CPU time, or wait much longer; in the main thread only."""
    waiting_seconds = WAITING_FACTOR * seconds

    def interrupt(number: int, frame: FrameType | None) -> None:
        computed = number == signal.SIGPROF
        raise Hung(f"more than {seconds:g} s of CPU time" if computed else f"more than {waiting_seconds:g} s")

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, waiting_seconds)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def quiet() -> Iterator[None]:
    """Discard logs: targets warn of each input, as they should."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        yield
    finally:
        structlog.reset_defaults()


def memory_bytes() -> int:
    """Return the memory of this process, without caches and after free memory was returned.

    A bounded cache grows until it is full, as long as all inputs differ; its own tests check the bound.
    """
    clear_caches()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc, over all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def live_bytes() -> int:
    """Return the allocated memory of this process, without caches and without free memory that allocators hold.

    For inputs of very different sizes: after the largest one the process permanently holds more, though nothing is
    live.
    """
    clear_caches()
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    used = libc.mallinfo2()
    return int(used.uordblks + used.hblkhd) + _python_bytes()


def _python_bytes() -> int:
    """Return the bytes of objects in Python's own allocator, which reports them only on standard error."""
    with tempfile.TemporaryFile() as output:
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(output.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(before, 2)
            os.close(before)
        output.seek(0)
        found = re.search(rb"# bytes in allocated blocks *= *([0-9,]+)", output.read())
    return int(found[1].replace(b",", b"")) if found else 0  # with PYTHONMALLOC=malloc all memory is glibc's


def clear_caches() -> None:
    """Clear the caches of the product."""
    for each in [*_frozen_caches(), *_scanned_caches()]:
        each.cache_clear()


def _scanned_caches() -> list[_lru_cache_wrapper[object] | SpecCache[object]]:
    """Return the product's caches among the objects that garbage collections scan."""
    found = [one for one in gc.get_objects() if isinstance(one, _lru_cache_wrapper | SpecCache)]
    return [each for each in found if str(each.__module__).startswith("cotenant.")]


@cache
def _frozen_caches() -> list[_lru_cache_wrapper[object] | SpecCache[object]]:
    """Return the product's caches among the objects that are frozen, as they are after pytest's collection."""
    if not gc.get_freeze_count():
        return []
    gc.collect()
    gc.unfreeze()
    found = _scanned_caches()
    gc.freeze()
    return found


def name_of(data: bytes) -> str:
    """Return a short file name for an input."""
    return hashlib.sha256(data).hexdigest()[:12]
