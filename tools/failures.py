"""Draws docs/failures.md from the rules that are shipped: `make docs`."""

from __future__ import annotations

from pathlib import Path

from cotenant.core.failures.retry import RetryRules
from cotenant.core.failures.rules import Rule
from cotenant.services.queue.jobs.failure_classifier import SUSPECT_JOBS, read_rules

PAGE = Path(__file__).resolve().parent.parent / "docs" / "failures.md"

TEXT = """\
# How failures are told apart, and what follows

An attempt that fails has a **class**, a **blame** (`user`, `infrastructure` or `unknown`) and a line that says so. They
are read once: from the exit status, the kernel's word on memory, what the node saw meanwhile, and the last 4 KiB of
output of the process that failed first, of which only that line is kept. `cotenant show ID` tells it, and `cotenant
failures [--by tenant|node|user|model] [--since 7d]` sums it up as Philly's table does (Jeon et al., ATC 2019).

## What follows

| failure | tried again? |
|---|---|
| the user's own | never, whatever `retries` says: it would come again |
| the machines', transient | {infrastructure} times without counting, then as `retries` says |
| a GPU's fault, which takes it out of service | the same, on any other GPU, of that node too |
| the machines', the node's fault | the same, and for {avoid:g} h not on that node |
| unknown | as `retries` says |

What may pass is tried again after {first:g} s, doubling to {most:g} s, spread so that jobs do not come back together;
what nobody can tell after 1 s, doubling to 300 s.

A node that a job keeps away from counts as closed to it alone; where nothing else could ever hold the job, it comes
back, and its story says so. {suspects} jobs within an hour for whose failure one node was at fault make a warning in
the queue's log (`node_suspected`), and nothing more: each of them keeps away by itself, what the node's agent sees
holds the node by its health, and jobs of one kind may fail alike on any node. Whether the node rests is an operator's
word (`cotenant cordon`). `cotenant move ID` sends a job elsewhere by hand.

In the configuration file: `retry_seconds` (the first pause), `retry_seconds_max` (no pause of either kind is longer),
`infrastructure_retries`, and `failure_rules`, a file of your own whose rules come first, and replace shipped ones of
the same name:

```toml
version = 1
[[rule]]
name = "licence"                # of a-z, 0-9, _ and -
class = "licence_server"
blame = "infrastructure"        # user, infrastructure or unknown
line = 'no licence left'        # a regular expression; or sign, signals, exit_codes, out_of_memory: all must hold
transient = true                # the same job may succeed when it is tried again
node_at_fault = false           # it is tried elsewhere
```

Patterns are searched for in each line, the last line first; lines are cut to 500 characters. Patterns have
[RE2's syntax](limits.md#patterns), and take a time linear in the line: no output can make one run for ever.

## A pre-run on one GPU

Much of what fails does so within its first minutes, on one GPU as on many: "run a job on a single GPU first" is a
guideline of the same study. A job of more than one GPU that says

```yaml
gpus: 8
pre_run: 5m          # from 1 s to a day
```

first runs as one replica alone: the first of its first role that has GPUs, with one of them, its cores per GPU (rounded
up) and all of its memory, `RANK=0`, `WORLD_SIZE=1` and `COTENANT_PRE_RUN=1`. Then

| the pre-run | what follows |
|---|---|
| tells of its first step of training | it has passed: it is stopped, with its grace, and the gang is queued |
| still runs after its time | the same |
| ends with status 0 | it has passed, and the gang is queued; the job has not succeeded |
| fails | a failure like any other, with the same classes and retries; the next attempt is a pre-run again |
| is preempted, moved, suspended or lost | the next attempt is a pre-run again |

So the GPUs of a job that breaks on import are never gathered. Once it has passed no attempt of the job is a pre-run
any more, whatever restarts. It is an attempt with a number, a story and output (`cotenant show`, `cotenant logs`), it
counts one GPU against its tenant's limit, and its time against what the job has attained; the predictor learns
nothing from it, and its cores are never changed. Forecasts are of the whole gang, as if the pre-run had passed, and
say that it comes before. A program that cannot run alone should end with status 0 where it finds `COTENANT_PRE_RUN`,
once it has loaded what it needs. Simulations have no pre-runs.

## The rules that are shipped

In their order; the first that holds decides. *t*: transient, *n*: the node is at fault.

| rule | class | blame | | for example |
|---|---|---|---|---|
{rules}"""


def page() -> str:
    """Write the whole page."""
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
    """Write one rule."""
    flags = " ".join(["*t*"] * rule.transient + ["*n*"] * rule.node_at_fault)
    example = rule.example.replace("|", "\\|").replace("`", "'")
    shown = f"`{example[:90]}{'…' if len(example) > 90 else ''}`" if example else _how(rule)
    return f"| {rule.name} | {rule.failure_class} | {rule.blame} | {flags} | {shown} |\n"


def _how(rule: Rule) -> str:
    if rule.out_of_memory:
        return "the kernel killed it for memory"
    if rule.signals:
        return f"ended by signal {', '.join(map(str, rule.signals))}"
    return f"ended with status {', '.join(map(str, rule.exit_codes))}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"   {PAGE.relative_to(PAGE.parent.parent)} is drawn")
