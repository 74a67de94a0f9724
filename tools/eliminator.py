"""Generates docs/eliminator.svg: the eliminator on a model node for half an hour. `make docs` runs it."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib as mpl  # noqa: E402 - the root of the checkout has to be on the path first
from matplotlib import pyplot as plt  # noqa: E402 - as above

from cotenant.conformance.contention_node import PEAK, ModelNode, Trainer, hog  # noqa: E402 - as above
from cotenant.core.policy.protocols import Directive, NodeWindow  # noqa: E402 - as above
from cotenant.policies.coda_eliminator.ladder import describe  # noqa: E402 - as above
from cotenant.policies.coda_eliminator.policy import CodaEliminator  # noqa: E402 - as above
from cotenant.simulator.report.style import ARMS, FAINT, MUTED, PAPER, look  # noqa: E402 - as above

PICTURE = ROOT / "docs" / "eliminator.svg"
SLOWDOWN, COMES, LEAVES, END = 0.4, 300.0, 1500.0, 1800.0
BLUE, ORANGE, GREEN = ARMS[1], ARMS[2], ARMS[3]

WindowResult = tuple[NodeWindow, list[Directive]]


def scenario() -> list[WindowResult]:
    """Run a CPU job that slows a training job by 40 %, from its arrival to its end."""
    cpu_job = hog(SLOWDOWN, begin=COMES, end=LEAVES)
    return ModelNode([Trainer()], [cpu_job], seed=4, enforced=True).run(CodaEliminator(), int(END / 5))


def draw(windows: list[WindowResult]) -> str:
    """Return the figure as SVG: the rate, the bandwidth, and the throttling of the CPU job."""
    minutes = [window.now / 60 for window, _ in windows]
    jobs = [{attempt.job_id: attempt for attempt in window.attempts} for window, _ in windows]
    with look():
        mpl.rcParams["svg.fonttype"] = "path"  # identical glyphs on all machines
        figure, (rate, memory, held) = plt.subplots(3, 1, sharex=True, figsize=(8.4, 6.0), layout="constrained")
        figure.set_facecolor(PAPER)
        rate.plot(minutes, [job["dnn"].rate_per_second or 0.0 for job in jobs], color=BLUE, linewidth=1.2)
        rate.axhline(9.5, color=MUTED, linestyle=":", linewidth=1.0)
        rate.set(ylabel="steps/s", ylim=(0, 12), title="The training job's rate; dotted: 95 % of its baseline")
        drawn = [100 * (window.memory_bandwidth_bytes_per_second or 0.0) / PEAK for window, _ in windows]
        memory.plot(minutes, drawn, color=ORANGE, linewidth=1.2)
        for limit in (75, 65):
            memory.axhline(limit, color=MUTED, linestyle=":", linewidth=1.0)
        memory.set(
            ylabel="% of the peak", ylim=(0, 108), title="Memory bandwidth; dotted: the pressure and the calm threshold"
        )
        share = [job["hog"].throttle.bandwidth_percent if "hog" in job else float("nan") for job in jobs]
        held.step(minutes, share, color=GREEN, where="pre")
        held.set(ylabel="% of the bandwidth", ylim=(0, 108), title="Bandwidth limit of the CPU job", xlabel="minutes")
        held.set_yticks([10, 20, 50, 100])
        for axes in (rate, memory, held):
            axes.grid(axis="y", color=FAINT)
            axes.set_xlim(0, END / 60)
            for window, directives in windows:
                for _ in directives:
                    axes.axvline(window.now / 60, color=MUTED, linewidth=0.4)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        plt.close(figure)
    return re.sub(r"(\d\.\d\d)\d+", r"\1", out.getvalue()).replace(" \n", "\n")


def table(windows: list[WindowResult]) -> str:
    """Return the directives as a table for the page."""
    lines = ["| after | throttle of the CPU job | reason |", "|---|---|---|"]
    for window, directives in windows:
        for directive in directives:
            throttle, reason = directive.throttle, directive.reason
            lines.append(f"| {window.now - COMES:.0f} s | {describe(throttle) if throttle else ''} | {reason} |")
    return "\n".join(lines)


if __name__ == "__main__":
    windows = scenario()
    PICTURE.write_text(draw(windows), encoding="utf-8")
    print(table(windows))
