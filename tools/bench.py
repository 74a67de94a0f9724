"""Runs the benchmarks one after the other, and says what is worse than in the last committed result: `make bench`.

    make bench                                   all that fit into a quarter of an hour, as `FORMS` has them
    make bench ARGS="--only mesh,placement"      some, these in their quick form, or those that stand apart
    make bench ARGS="--long --only kills"        the long form, which the committed result is not compared with
    make bench ARGS="--runs 3 --save"            take three runs as what to compare with from now on
    make bench ARGS=--strict                     let a bar that is missed count as a failure

One that fails or takes too long does not stop the others. What came out is written down after each of them, so that
whatever ends the run keeps what is done: in report/bench.json and, as tables, report/bench.md; what each said beside
its figures in report/bench/NAME.log. A bar that is missed is told. Ends with 1 where one failed, or a figure is worse
than it was by more than the spread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import comparing  # noqa: E402 - the root of the checkout has to be on the path first

BASELINE, REPORT = ROOT / "benchmarks" / "results.json", ROOT / "report"
MINUTES_MAX = 15.0  # of a run of all
FIRST = ("agent", "agent_contention", "mesh", "placement", "placement_live")  # these need a quiet machine most
LAST = ("predictor_duration", "kills")  # these take longest
PARTS = ("placement_speed", "placement_fragmentation")  # of another one; may be run by their names
SECONDS_MAX, SECONDS_MAX_LONG = 300.0, 3600.0
GRACE_SECONDS = 20.0
FAILED, WORSE, MISSED = "failed", "worse than committed", "bars missed"
LOAD_QUIET = 0.5  # processes per core that want to run before we begin


@dataclass(frozen=True, slots=True)
class Form:
    """How a benchmark is part of a run of all: in its quick form, `long_form`, or not, and why it stands `excluded`.

    `seconds` are those that it usually takes on two quiet cores, so long as nobody knows better a minute.
    """

    seconds: float = 60.0
    long_form: bool = False
    excluded: str = ""


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "agent": Form(60),
        "agent_contention": Form(100),
        "mesh": Form(20),
        "overload": Form(
            900, excluded="a quarter of an hour of trouble on purpose, which others on the machine would feel"
        ),
        "placement": Form(90),
        "placement_live": Form(30),
        "shared_tenants": Form(20),
        "archive": Form(5),
        "arrays": Form(5),
        "chaos": Form(1800, excluded="half an hour of kills and cuts, as root; thirty steps say too little"),
        "cluster": Form(45),
        "contention": Form(15),
        "migration": Form(15, long_form=True),
        "predictor": Form(50),
        "predictor_fits": Form(10),
        "predictor_models": Form(5),
        "predictor_replicas": Form(30),
        "predictor_service": Form(60),
        "qos": Form(30),
        "quality": Form(25),
        "simulator": Form(35),
        "sizing": Form(35),
        "sizing_live": Form(10),
        "predictor_duration": Form(30),
        "kills": Form(40),
    }
)


def form_of(name: str) -> Form:
    """Say how a benchmark is part of a run of all; one that nobody has measured yet is, in its quick form."""
    return FORMS.get(name, Form())


def excluded() -> dict[str, str]:
    """Say which benchmarks are no part of a run of all, why, and how they are run."""
    return {
        name: f'{form.excluded}: make bench ARGS="--long --only {name}"'
        for name, form in FORMS.items()
        if form.excluded
    }


@dataclass(frozen=True, slots=True)
class RunResult:
    """How one run of a benchmark ended. `error` is empty where its rows came out."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    processor_seconds: float = 0.0
    error: str = ""


def run(command: Sequence[str], log: Path, seconds_max: float) -> RunResult:
    """Run one benchmark that prints its rows as JSON. When we are interrupted, it and its processes are ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    out, begin = log.with_suffix(".json"), time.monotonic()
    environment = os.environ | {"COTENANT_LOG": os.environ.get("COTENANT_LOG", "error")}
    before = _children_seconds()
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        error = ""
        try:
            process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            error = f"it was not done after {seconds_max:.0f} s"
        finally:
            _terminate(process)
    rows, problem = _rows(out, process.returncode, log)
    return RunResult([] if error else rows, time.monotonic() - begin, _children_seconds() - before, error or problem)


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """End a benchmark and whatever is left in its session's first group: kindly, so that it can clean up, then not."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rows(out: Path, code: int, log: Path) -> tuple[list[dict[str, Any]], str]:
    try:
        rows = json.loads(out.read_bytes())
    except ValueError:
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        return [], f"ended with {code}: {last[:200]}"
    return rows, ""


def run_conditions(form: str) -> dict[str, Any]:
    """Tell on what a result is taken."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0] / cores
    return {
        "form": form,
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": cores,
        "python": platform.python_version(),
        "load_per_core": round(load, 2),
        "noisy": load > LOAD_QUIET,
    }


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What of the benchmarks is to be run, and how: each `runs` times, and none for longer than `seconds_max`.

    `long`: all in their long form, not in that which `FORMS` has. What would not be done in `minutes_max` is left out.
    """

    names: Sequence[str]
    runs: int
    seconds_max: float
    long: bool = False
    minutes_max: float = math.inf

    def of(self, name: str) -> list[str]:
        """Give the command that runs one."""
        long_form = self.long or form_of(name).long_form
        return [sys.executable, "-m", f"benchmarks.{name}", "--json", *([] if long_form else ["--quick"])]


def measure(plan: RunPlan, left_out: dict[str, str]) -> Iterator[tuple[str, RunResult]]:
    """Run benchmarks, telling of each on stderr; those for which no time is left come to be `left_out`, with why."""
    began = time.monotonic()
    for number, name in enumerate(plan.names, 1):
        left = 60 * plan.minutes_max - (time.monotonic() - began)
        if plan.runs * form_of(name).seconds > left:
            left_out[name] = f"there was no time left for it in {plan.minutes_max:g} minutes"
            continue
        for again in range(plan.runs):
            which = f", run {again + 1} of {plan.runs}" if plan.runs > 1 else ""
            passed = (time.monotonic() - began) / 60
            print(
                f"[{number}/{len(plan.names)}, {passed:.1f} min] {name}{which} …", end="", file=sys.stderr, flush=True
            )
            most = min(plan.seconds_max, max(left, form_of(name).seconds))
            done = run(plan.of(name), REPORT / "bench" / f"{name}.log", most)
            missed = sum(row["holds"] is False for row in done.rows)
            how = done.error or f"{len(done.rows)} figures" + (f", {missed} bars missed" if missed else "")
            print(f" {done.seconds:.0f} s ({done.processor_seconds:.0f} s of processor): {how}", file=sys.stderr)
            yield name, done


def discover() -> tuple[str, ...]:
    """Name all benchmarks, in the order in which they are run."""
    modules = (ROOT / "benchmarks").glob("*.py")
    runnable = {path.stem for path in modules if "\nif __name__" in path.read_text()} - set(PARTS)
    return (*FIRST, *sorted(runnable - {*FIRST, *LAST}), *LAST)


def parse_names(only: str) -> tuple[str, ...]:
    """Read a list of benchmarks; without one, all that do not stand apart. Raises ValueError that names the unknown."""
    known = (*discover(), *PARTS)
    names = tuple(name.strip() for name in only.split(",") if name.strip())
    names = names or tuple(name for name in discover() if not form_of(name).excluded)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def read_baseline() -> dict[str, Any]:
    """Read the committed result; nothing where there is none."""
    return json.loads(BASELINE.read_bytes()) if BASELINE.exists() else {}


def save(runs: dict[str, list[RunResult]], conditions: dict[str, Any]) -> None:
    """Let these runs be what is compared with; benchmarks that were not run, or failed, keep what they have."""
    baseline = read_baseline()
    kept = {name: comparing.summarize_runs([done.rows for done in each]) for name, each in runs.items()}
    benchmarks = baseline.get("benchmarks", {}) | {name: rows for name, rows in kept.items() if rows}
    took = baseline.get("taken", {}) | {name: conditions for name, rows in kept.items() if rows}
    order = [name for name in (*discover(), *PARTS) if name in benchmarks]
    long_form = {
        "taken": {name: took[name] for name in order},
        "benchmarks": {name: benchmarks[name] for name in order},
    }
    _write(BASELINE, json.dumps(long_form, indent=1, ensure_ascii=False) + "\n")


def write(
    runs: dict[str, list[RunResult]], conditions: dict[str, Any], baseline: dict[str, Any], left_out: dict[str, str]
) -> None:
    """Write down the last run of each, beside the committed result, and what was not run."""
    last = {name: asdict(each[-1]) for name, each in runs.items()}
    result = {"taken": conditions, "benchmarks": last, "left_out": left_out}
    REPORT.mkdir(exist_ok=True)
    _write(REPORT / "bench.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    _write(REPORT / "bench.md", comparing.markdown(result, baseline))


def _write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)


def print_summary(runs: dict[str, list[RunResult]], baseline: dict[str, Any], left_out: dict[str, str]) -> Counter[str]:
    """Say what is not as it should be; counts what failed, bars that are missed, and figures that are worse."""
    problems: Counter[str] = Counter()
    last = {name: each[-1] for name, each in runs.items()}
    for name, done in last.items():
        if done.error:
            print(f"failed: {name}: {done.error}")
            problems[FAILED] += 1
        for row in done.rows:
            if row["holds"] is False:
                print(f"bar missed: {name}: {row['name']}: {row['value']:.4g} {row['unit']}, {row['bar']}")
                problems[MISSED] += 1
        for change in comparing.changes(name, done.rows, baseline.get("benchmarks", {}).get(name, {})):
            print(change)
            problems[WORSE] += bool(change.worse)
    for name, why in left_out.items():
        print(f"not run: {name}: {why}")
    if noisy := [name for name in last if baseline.get("taken", {}).get(name, {}).get("noisy")]:
        print(f"the committed figures of {', '.join(noisy)} were taken on a loaded machine")
    spent, worked = (
        sum(getattr(done, of) for each in runs.values() for done in each) for of in ("seconds", "processor_seconds")
    )
    arguments = ", ".join(f"{problems[what]} {what}" for what in (FAILED, WORSE, MISSED))
    print(f"{len(last)} benchmarks in {spent:.0f} s ({worked:.0f} s of processor): {arguments}")
    print("report/bench.md, report/bench.json")
    return problems


def exit_status(problems: Counter[str], *, strict: bool, saved: bool) -> int:
    """Say with what to end: bars that are missed count where asked, and what is worse does not where it was saved.

    >>> exit_status(Counter({MISSED: 3}), strict=False, saved=False), exit_status(Counter({MISSED: 3}), strict=True, saved=False)
    (0, 1)
    """
    return int(bool(problems[FAILED] or (problems[WORSE] and not saved) or (problems[MISSED] and strict)))


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME,…", help="some of them, in this order")
    parser.add_argument("--long", action="store_true", help="their long form")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="run each so often")
    parser.add_argument("--seconds-max", type=float, metavar="S", help="how long each run may take")
    parser.add_argument(
        "--save", action="store_true", help="compare with these runs from now on; nothing is worse then"
    )
    parser.add_argument("--strict", action="store_true", help="end with 1 where a bar is missed, too")
    parser.add_argument(
        "--list", action="store_true", help="name the benchmarks, how long they take, and which stand apart"
    )
    parser.add_argument("--minutes-max", type=float, metavar="M", help=f"of a run of all; {MINUTES_MAX:g} for each run")
    arguments = parser.parse_args()
    try:
        names = parse_names(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if arguments.runs < 1 or (arguments.save and arguments.long):
        parser.error("--runs is at least 1" if arguments.runs < 1 else "--save keeps the quick form: leave --long away")
    if arguments.list:
        for name in names:
            print(f"{name:20} {form_of(name).seconds:5.0f} s{'  whole' * form_of(name).long_form}")
        print("\n".join(f"{name:20} apart: {why}" for name, why in excluded().items()))
        return 0
    of_all = not (arguments.only or arguments.long)
    minutes_max = arguments.minutes_max or (arguments.runs * MINUTES_MAX if of_all else math.inf)
    seconds_max = arguments.seconds_max or (SECONDS_MAX_LONG if arguments.long else SECONDS_MAX)
    return run_benchmarks(
        RunPlan(names, arguments.runs, seconds_max, arguments.long, minutes_max),
        excluded() if of_all else {},
        save_it=arguments.save,
        strict=arguments.strict,
    )


def run_benchmarks(plan: RunPlan, left_out: dict[str, str], *, save_it: bool, strict: bool) -> int:
    """Run benchmarks, write down and say what came of them; gives with what to end."""
    conditions = run_conditions("long" if plan.long else "quick")
    if conditions["noisy"]:
        print(comparing.conditions(conditions).replace("**", ""), file=sys.stderr)
    baseline = {} if plan.long else read_baseline()
    runs: dict[str, list[RunResult]] = {}
    interrupted = False
    try:
        for name, done in measure(plan, left_out):
            runs.setdefault(name, []).append(done)
            write(runs, conditions, baseline, left_out)
            if save_it and len(runs[name]) == plan.runs:
                save({name: runs[name]}, conditions)
    except KeyboardInterrupt:
        interrupted = True
        print("\ninterrupted: what is done is kept", file=sys.stderr)
    write(runs, conditions, baseline, left_out)
    problems = print_summary(runs, baseline, left_out)
    if save_it:
        noisy = "; it says that the machine was loaded" if conditions["noisy"] else ""
        print(f"{BASELINE.relative_to(ROOT)} is written{noisy}")
    return 130 if interrupted else exit_status(problems, strict=strict, saved=save_it)


if __name__ == "__main__":
    sys.exit(main())
