"""Generates docs/failures.md from the built-in rules: `make docs`."""

from __future__ import annotations

from pathlib import Path

from cotenant.core.failures.retry import RetryRules
from cotenant.core.failures.rules import Rule
from cotenant.services.queue.jobs.failure_classifier import SUSPECT_JOBS, read_rules

PAGE = Path(__file__).resolve().parent.parent / "docs" / "failures.md"

TEXT = """\
# How failures are classified, and what follows

A failed attempt has a **class**, a **blame** (`user`, `infrastructure` or `unknown`) and a line of evidence. They are
determined once: from the exit status, the kernel's record of memory kills, what the node observed during the attempt,
and the last 4 KiB of output of the process that failed first; only the matching line is kept. `cotenant show ID` shows
them, and `cotenant failures [--by tenant|node|user|model] [--since 7d]` summarizes them as Philly's table does (Jeon
et al., ATC 2019).

## What follows

| failure | retried? |
|---|---|
| the user's own | never, whatever `retries` says: it would fail again |
| infrastructure, transient | {infrastructure} times without counting, then as `retries` says |
| a GPU's fault, which takes it out of service | the same, on any other GPU, also of that node |
| infrastructure, the node's fault | the same, and for {avoid:g} h not on that node |
| unknown | as `retries` says |

A transient failure is retried after {first:g} s, doubling to {most:g} s, with jitter so that jobs do not return
together; an unknown failure after 1 s, doubling to 300 s.

A node that a job avoids counts as closed for that job alone. If no other node could ever hold the job, it returns to
that node, and its history says so. If {suspects} jobs fail within an hour through the fault of one node, the queue
logs a warning (`node_suspected`) and does nothing else: each of these jobs avoids the node by itself, node health
holds the node for what its agent observes, and similar jobs may fail alike on any node. Taking the node out of service
is an operator's decision (`cotenant cordon`). `cotenant move ID` moves a job elsewhere by hand.

In the configuration file: `retry_seconds` (the first delay), `retry_seconds_max` (the maximum of both kinds of delay),
`infrastructure_retries`, and `failure_rules`, a file of your own rules, which come first and replace built-in rules of
the same name:

```toml
version = 1
[[rule]]
name = "licence"                # of a-z, 0-9, _ and -
class = "licence_server"
blame = "infrastructure"        # user, infrastructure or unknown
line = 'no licence left'        # a regular expression; or sign, signals, exit_codes, out_of_memory: all must match
transient = true                # a retry of the same job may succeed
node_at_fault = false           # if true, the retry avoids the node
```

Patterns are searched in each line, the last line first; lines are cut to 500 characters. Patterns have [RE2's
syntax](limits.md#patterns) and run in linear time: no output can make a pattern run forever.

## A pre-run on one GPU

Many failures happen within the first minutes, on one GPU as on many: "run a job on a single GPU first" is a guideline
of the same study. A job with more than one GPU that specifies

```yaml
gpus: 8
pre_run: 5m          # from 1 s to a day
```

first runs as a single replica: the first replica of its first role with GPUs, with one GPU, its cores per GPU (rounded
up) and all of its memory, `RANK=0`, `WORLD_SIZE=1` and `COTENANT_PRE_RUN=1`. Then

| the pre-run | what follows |
|---|---|
| reports its first training step | it has passed: it is stopped, with its grace, and the gang is queued |
| still runs after its time | the same |
| exits with status 0 | it has passed, and the gang is queued; the job has not succeeded |
| fails | a failure like any other, with the same classes and retries; the next attempt is a pre-run again |
| is preempted, moved, suspended or lost | the next attempt is a pre-run again |

So the GPUs of a job that fails on import are never gathered. After a passed pre-run, no later attempt of the job is a
pre-run. A pre-run is an attempt with a number, a history and output (`cotenant show`, `cotenant logs`). It counts one
GPU against its tenant's limit, and its time counts as attained service of the job; the predictor learns nothing from
it, and its cores never change. Forecasts are of the whole gang, as if the pre-run had passed, and mention the pre-run.
A program that cannot run alone should check for `COTENANT_PRE_RUN` and exit with status 0 once it has loaded what it
needs. Simulations have no pre-runs.

## The built-in rules

In this order; the first match decides. *t*: transient, *n*: the node is at fault.

| rule | class | blame | | for example |
|---|---|---|---|---|
{rules}"""


def page() -> str:
    """Return the whole page."""
    retrying = RetryRules()
    return TEXT.format(
        infrastructure=retrying.infrastructure_retries,
        first=retrying.back_off_seconds,
        most=retrying.back_off_seconds_max,
        avoid=retrying.avoid_seconds / 3600,
        suspects=SUSPECT_JOBS,
        rules="".join(map(row, read_rules())),
    )


def row(rule: Rule) -> str:
    """Return the table row of a rule."""
    flags = " ".join(["*t*"] * rule.transient + ["*n*"] * rule.node_at_fault)
    example = rule.example.replace("|", "\\|").replace("`", "'")
    shown = f"`{example[:90]}{'…' if len(example) > 90 else ''}`" if example else _how(rule)
    return f"| {rule.name} | {rule.failure_class} | {rule.blame} | {flags} | {shown} |\n"


def _how(rule: Rule) -> str:
    if rule.out_of_memory:
        return "killed by the kernel for memory"
    if rule.signals:
        return f"killed by signal {', '.join(map(str, rule.signals))}"
    return f"exit status {', '.join(map(str, rule.exit_codes))}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"   wrote {PAGE.relative_to(PAGE.parent.parent)}")
