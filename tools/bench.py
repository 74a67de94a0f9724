"""Benchmark runner: `make bench` runs the benchmarks one after another and reports regressions.

    make bench                                   the default set, within 15 minutes, in the forms of `FORMS`
    make bench ARGS="--only mesh,placement"      selected benchmarks in their quick form, also excluded ones
    make bench ARGS="--long --only kills"        the long form, which is not compared with the committed results
    make bench ARGS="--runs 3 --save"            replace the committed results by the results of three runs
    make bench ARGS=--strict                     also fail if a bar is missed

A benchmark that fails or times out does not stop the others. Results are written after each benchmark, so an
interrupted run keeps what is complete: figures in report/bench.json and, as tables, in report/bench.md; the stderr of
each benchmark in report/bench/NAME.log. Missed bars are listed. The exit status is 1 if a benchmark failed or a figure
is worse than the committed one by more than its spread.
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
MINUTES_MAX = 15.0  # for the default set
FIRST = ("agent", "agent_contention", "mesh", "placement", "placement_live")  # the most sensitive to other load
LAST = ("predictor_duration", "kills")  # the slowest
PARTS = ("placement_speed", "placement_fragmentation")  # parts of `placement`; can be selected by name
SECONDS_MAX, SECONDS_MAX_LONG = 300.0, 3600.0
GRACE_SECONDS = 20.0
FAILED, WORSE, MISSED = "failed", "worse than committed", "bars missed"
LOAD_QUIET = 0.5  # runnable processes per core before the run


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a benchmark in the default set: quick, `long_form`, or `excluded` for a reason.

    `seconds` is its usual duration on two quiet cores; a minute if not measured yet.
    """

    seconds: float = 60.0
    long_form: bool = False
    excluded: str = ""


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "agent": Form(60),
        "agent_contention": Form(100),
        "mesh": Form(20),
        "overload": Form(900, excluded="overloads the machine on purpose for 15 minutes"),
        "placement": Form(90),
        "placement_live": Form(30),
        "gpu": Form(540, excluded="needs an NVIDIA GPU"),
        "shared_tenants": Form(20),
        "archive": Form(5),
        "arrays": Form(5),
        "python_map": Form(20, excluded="the default set has no minute left for it"),
        "chaos": Form(1800, excluded="injects faults for 30 minutes, as root; the quick form says too little"),
        "cluster": Form(45),
        "folders": Form(15, excluded="the default set has no minute left for it"),
        "gpu_types": Form(90, excluded="the default set has no minute left for it"),
        "elastic": Form(60, excluded="the default set has no minute left for it"),
        "commands": Form(10),
        "contention": Form(15),
        "migration": Form(15, long_form=True),
        "sessions": Form(25, excluded="the default set has no minute left for it"),
        "restart": Form(70, excluded="starts meshes on stores with 50,000 jobs, which takes a minute"),
        "slurm": Form(1200, excluded="runs the same jobs on a real Slurm three times, for 10 minutes, as root"),
        "predictor": Form(50),
        "tracing": Form(5),
        "predictor_fits": Form(10),
        "predictor_models": Form(5),
        "predictor_replicas": Form(30),
        "predictor_service": Form(60),
        "qos": Form(30),
        "quality": Form(25),
        "queue_order": Form(7200, excluded="simulates published traces under eight kinds of predictions for hours"),
        "simulator": Form(35),
        "scale": Form(150, excluded="the default set has no minutes left for 4,000 nodes"),
        "sizing": Form(35),
        "sizing_live": Form(10),
        "predictor_duration": Form(30),
        "kills": Form(40),
        "web_dashboard": Form(120, excluded="needs a Chromium, and the default set has no minutes left for it"),
    }
)


def form_of(name: str) -> Form:
    """Return the form of a benchmark; without an entry in `FORMS` it runs in its quick form."""
    return FORMS.get(name, Form())


def excluded() -> dict[str, str]:
    """Return the benchmarks outside the default set, with the reason and the command that runs each."""
    return {
        name: f'{form.excluded}; run: make bench ARGS="--long --only {name}"'
        for name, form in FORMS.items()
        if form.excluded
    }


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one run of a benchmark; `error` is empty if it printed its rows."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    processor_seconds: float = 0.0
    error: str = ""


def run(command: Sequence[str], log: Path, seconds_max: float) -> RunResult:
    """Run a benchmark that prints its rows as JSON; an interrupt also ends its processes."""
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
            error = f"timed out after {seconds_max:.0f} s"
        finally:
            _terminate(process)
    rows, problem = _rows(out, process.returncode, log)
    return RunResult([] if error else rows, time.monotonic() - begin, _children_seconds() - before, error or problem)


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """End a benchmark and its process group: interrupt it so that it can clean up, then kill the group."""
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
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        return [], f"exit status {code}: {last[:200]}"
    return rows, ""


def run_conditions(form: str) -> dict[str, Any]:
    """Return the conditions of a run: machine, load and time."""
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
    """The benchmarks to run: each `runs` times, each run for at most `seconds_max`.

    `long`: use the long form of all benchmarks instead of the forms of `FORMS`. Benchmarks that would not complete
    within `minutes_max` are skipped.
    """

    names: Sequence[str]
    runs: int
    seconds_max: float
    long: bool = False
    minutes_max: float = math.inf

    def of(self, name: str) -> list[str]:
        """Return the command that runs a benchmark."""
        long_form = self.long or form_of(name).long_form
        return [sys.executable, "-m", f"benchmarks.{name}", "--json", *([] if long_form else ["--quick"])]


def measure(plan: RunPlan, left_out: dict[str, str]) -> Iterator[tuple[str, RunResult]]:
    """Run benchmarks with progress on stderr; add benchmarks that do not fit into the time to `left_out`."""
    began = time.monotonic()
    for number, name in enumerate(plan.names, 1):
        left = 60 * plan.minutes_max - (time.monotonic() - began)
        if plan.runs * form_of(name).seconds > left:
            left_out[name] = f"no time left within {plan.minutes_max:g} minutes"
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
            print(f" {done.seconds:.0f} s ({done.processor_seconds:.0f} s CPU): {how}", file=sys.stderr)
            yield name, done


def discover() -> tuple[str, ...]:
    """Return the names of all benchmarks, in the order in which they run."""
    folder = ROOT / "benchmarks"
    runnable = {path.stem for path in folder.glob("*.py") if "\nif __name__" in path.read_text()} - set(PARTS)
    runnable |= {path.parent.name for path in folder.glob("*/__main__.py")}
    return (*FIRST, *sorted(runnable - {*FIRST, *LAST}), *LAST)


def parse_names(only: str) -> tuple[str, ...]:
    """Parse a comma-separated list of benchmarks; an empty list is the default set.

    Raises:
        ValueError: a name is unknown.
    """
    known = (*discover(), *PARTS)
    names = tuple(name.strip() for name in only.split(",") if name.strip())
    names = names or tuple(name for name in discover() if not form_of(name).excluded)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown benchmark: {', '.join(unknown)}; known are {', '.join(known)}")
    return names


def read_baseline() -> dict[str, Any]:
    """Read the committed results; empty if there are none."""
    return json.loads(BASELINE.read_bytes()) if BASELINE.exists() else {}


def save(runs: dict[str, list[RunResult]], conditions: dict[str, Any]) -> None:
    """Replace the committed results of these benchmarks; benchmarks that failed or did not run keep theirs."""
    baseline = read_baseline()
    kept = {name: comparing.summarize_runs([done.rows for done in each]) for name, each in runs.items()}
    benchmarks = baseline.get("benchmarks", {}) | {name: rows for name, rows in kept.items() if rows}
    took = baseline.get("taken", {}) | {name: conditions for name, rows in kept.items() if rows}
    order = [name for name in (*discover(), *PARTS) if name in benchmarks]
    document = {"taken": {name: took[name] for name in order}, "benchmarks": {name: benchmarks[name] for name in order}}
    _write(BASELINE, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def write(
    runs: dict[str, list[RunResult]], conditions: dict[str, Any], baseline: dict[str, Any], left_out: dict[str, str]
) -> None:
    """Write the last run of each benchmark beside the committed results, and the skipped benchmarks."""
    last = {name: asdict(each[-1]) for name, each in runs.items()}
    result = {"taken": conditions, "benchmarks": last, "left_out": left_out}
    REPORT.mkdir(exist_ok=True)
    _write(REPORT / "bench.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    _write(REPORT / "bench.md", comparing.markdown(result, baseline))


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)


def print_summary(runs: dict[str, list[RunResult]], baseline: dict[str, Any], left_out: dict[str, str]) -> Counter[str]:
    """Print failures, missed bars and changed figures; return how many there are of each kind."""
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
        print(f"skipped: {name}: {why}")
    if noisy := [name for name in last if baseline.get("taken", {}).get(name, {}).get("noisy")]:
        print(f"the committed results of {', '.join(noisy)} were measured on a loaded machine")
    spent, worked = (
        sum(getattr(done, of) for each in runs.values() for done in each) for of in ("seconds", "processor_seconds")
    )
    counts = ", ".join(f"{problems[what]} {what}" for what in (FAILED, WORSE, MISSED))
    print(f"{len(last)} benchmarks in {spent:.0f} s ({worked:.0f} s CPU): {counts}")
    print("results: report/bench.md, report/bench.json")
    return problems


def exit_status(problems: Counter[str], *, strict: bool, saved: bool) -> int:
    """Return the exit status: missed bars count only if `strict`, worse figures only if not `saved`.

    >>> exit_status(Counter({MISSED: 3}), strict=False, saved=False)
    0
    >>> exit_status(Counter({MISSED: 3}), strict=True, saved=False)
    1
    """
    return int(bool(problems[FAILED] or (problems[WORSE] and not saved) or (problems[MISSED] and strict)))


def main() -> int:
    """Run the selected benchmarks and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME,…", help="benchmarks to run, in this order")
    parser.add_argument("--long", action="store_true", help="run the long form")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="runs of each benchmark")
    parser.add_argument("--seconds-max", type=float, metavar="S", help="time limit of each run")
    parser.add_argument(
        "--save",
        action="store_true",
        help="replace the committed results by these runs; worse figures are no failure then",
    )
    parser.add_argument("--strict", action="store_true", help="also exit with 1 if a bar is missed")
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the benchmarks, their durations, and which are excluded from the default set",
    )
    parser.add_argument(
        "--minutes-max", type=float, metavar="M", help=f"time limit of the default set; {MINUTES_MAX:g} times --runs"
    )
    arguments = parser.parse_args()
    try:
        names = parse_names(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if arguments.runs < 1 or (arguments.save and arguments.long):
        parser.error(
            "--runs must be at least 1" if arguments.runs < 1 else "--save stores the quick form; remove --long"
        )
    if arguments.list:
        for name in names:
            print(f"{name:20} {form_of(name).seconds:5.0f} s{'  long form' * form_of(name).long_form}")
        print("\n".join(f"{name:20} excluded: {why}" for name, why in excluded().items()))
        return 0
    default_set = not (arguments.only or arguments.long)
    minutes_max = arguments.minutes_max or (arguments.runs * MINUTES_MAX if default_set else math.inf)
    seconds_max = arguments.seconds_max or (SECONDS_MAX_LONG if arguments.long else SECONDS_MAX)
    return run_benchmarks(
        RunPlan(names, arguments.runs, seconds_max, arguments.long, minutes_max),
        excluded() if default_set else {},
        save_it=arguments.save,
        strict=arguments.strict,
    )


def run_benchmarks(plan: RunPlan, left_out: dict[str, str], *, save_it: bool, strict: bool) -> int:
    """Run benchmarks, write and print the results, and return the exit status."""
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
        print("\ninterrupted; completed results are kept", file=sys.stderr)
    write(runs, conditions, baseline, left_out)
    problems = print_summary(runs, baseline, left_out)
    if save_it:
        noisy = "; marked as measured on a loaded machine" if conditions["noisy"] else ""
        print(f"wrote {BASELINE.relative_to(ROOT)}{noisy}")
    return 130 if interrupted else exit_status(problems, strict=strict, saved=save_it)


if __name__ == "__main__":
    sys.exit(main())
