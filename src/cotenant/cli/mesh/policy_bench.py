"""`cotenant policies bench`: how long a policy takes to decide, beside the baseline of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cotenant import plugins
from cotenant.cli import views
from cotenant.cli.annotations import options, typer
from cotenant.cli.missing_extras import check_extras
from cotenant.cli.outcome import usage_error
from cotenant.cli.render import Column, print_table
from cotenant.core.spelling import did_you_mean

if TYPE_CHECKING:
    from cotenant.cli.mesh.decision_times import Times

JOBS, NODES = 10_000, 1000
COUNT_MIN = 4
SHARES = (0.25, 0.5, 1.0)  # of the jobs and nodes, to see how the time grows
BASELINES = {
    "queue": "fifo",
    "placement": "first-fit",
    "allocator": "requested",
    "predictor": "history",
    "contention": "none",
}
COLUMNS = (
    Column("JOBS", right=True),
    Column("NODES", right=True),
    Column("DECISION"),
    Column("TIME", right=True),
    Column("BASELINE", right=True),
    Column("RATIO", right=True),
)


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An installed policy.", show_default=False)],
    group: Annotated[
        str, typer.Option(metavar="GROUP", help="Its group, such as queue, if several groups have the name.")
    ] = "",
    jobs: Annotated[int, typer.Option(metavar="N", help="Jobs of the largest size.")] = JOBS,
    nodes: Annotated[int, typer.Option(metavar="N", help="Nodes of the largest size.")] = NODES,
    as_json: options.AsJson = False,
) -> None:
    """Time a policy's decisions at three sizes, beside the baseline of its group in the same run.

    A decision is an order of all jobs, a place for one gang, the cores of one job, an estimate of one job, or the
    directives for one node. Times are medians. What counts is the ratio, and how the time grows from the smallest size
    to the largest, which is four times as large: absolute times depend on the machine.

    \b
    Examples:
      cotenant policies bench small-first
      cotenant policies bench las --jobs 50000 --nodes 5000 --json
    """
    check_extras("policies bench", "research")
    plugin = _found(name, group)
    small = {option: count for option, count in {"--jobs": jobs, "--nodes": nodes}.items() if count < COUNT_MIN}
    if wrong := [f"{option} must be {COUNT_MIN} or more, not {count}" for option, count in small.items()]:
        raise usage_error("invalid size", details=wrong)
    from cotenant.cli.mesh import decision_times

    short = next(short for short, full in plugins.POLICY_GROUPS.items() if full == plugin.group)
    times = [
        decision_times.measured(
            short,
            plugin.make(),
            plugins.load(plugin.group, BASELINES[short]),
            jobs=round(share * jobs),
            nodes=round(share * nodes),
        )
        for share in SHARES
    ]
    if as_json:
        views.print_json([_view(plugin, BASELINES[short], one) for one in times])
        return
    print(f"{short}: {name}, beside the baseline {BASELINES[short]}")
    print_table(COLUMNS, [_row(one) for one in times])
    print(f"growth with {1 / SHARES[0]:g} times the size: {_growth(times):.1f} times the time")


def _found(name: str, group: str) -> plugins.Plugin:
    """Return the policy of a name.

    Raises:
        CommandError: there is none, it cannot be loaded, or several groups have one.
    """
    if group and group not in plugins.POLICY_GROUPS:
        known = ", ".join(plugins.POLICY_GROUPS)
        raise usage_error(f"--group must be one of {known}, not {group!r}{did_you_mean(group, plugins.POLICY_GROUPS)}")
    groups = {short: full for short, full in plugins.POLICY_GROUPS.items() if group in ("", short)}
    every = {short: plugins.discover(full) for short, full in groups.items()}
    found = {short: one for short, some in every.items() for one in some if one.name == name}
    if not found:
        known_names = sorted({one.name for some in every.values() for one in some})
        hint = "list all with `cotenant policies --here`"
        raise usage_error(f"no policy {name!r} is installed{did_you_mean(name, known_names)}", hint=hint)
    if len(found) > 1:
        raise usage_error(f"{name!r} is a policy of the groups {' and '.join(found)}", hint="choose one with --group")
    (plugin,) = found.values()
    if not plugin.healthy:
        raise usage_error(f"the policy {name!r} {plugin.error}")
    return plugin


def _growth(times: Sequence[Times]) -> float:
    return times[-1].seconds / times[0].seconds


def _row(times: Times) -> list[str]:
    return [
        f"{times.jobs:,}",
        f"{times.nodes:,}",
        times.decision,
        _shown(times.seconds),
        _shown(times.baseline_seconds),
        f"{times.ratio:.1f}",
    ]


def _shown(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def _view(plugin: plugins.Plugin, baseline: str, times: Times) -> views.View:
    return {
        "group": plugin.group,
        "name": plugin.name,
        "package": plugin.package,
        "jobs": times.jobs,
        "nodes": times.nodes,
        "decision": times.decision,
        "seconds": times.seconds,
        "baseline": baseline,
        "baseline_seconds": times.baseline_seconds,
        "ratio": times.ratio,
    }
