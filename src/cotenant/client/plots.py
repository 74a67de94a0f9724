"""The plots of simulations and comparisons: those of `--report`, for notebooks and files."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant import extras
from cotenant.client.errors import CotenantError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cotenant.simulator.comparison.summary import Comparison
    from cotenant.simulator.report.plots import Plot as Drawing

__all__ = ["Plot", "Plots"]

PNG_DPI = 100


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot: a notebook shows it; `save` writes it to a file; `figure` is matplotlib's, to change it."""

    title: str
    caption: str
    figure: Figure = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the plot to a file; the end of its name chooses the format: .png, .svg or .pdf."""
        self._write(path)

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self._write(out, "png")
        return out.getvalue()

    def _write(self, to: str | Path | io.BytesIO, form: str | None = None) -> None:
        from cotenant.simulator.report.style import look

        with look():
            self.figure.savefig(to, format=form, dpi=PNG_DPI)


class Plots:
    """Plots of one or more arms. They need matplotlib, which the extra `research` brings."""

    __slots__ = ()

    def _compared(self) -> Comparison:
        raise NotImplementedError

    def plot_averages(self) -> Plot:
        """Plot the average job completion time of each arm, and the lower bound where there is one."""
        return _drawn(lambda plots: plots.averages(self._compared()))

    def plot_distributions(self) -> Plot:
        """Plot which share of the jobs took, and waited, at most how long."""
        return _drawn(lambda plots: plots.distributions(plots.drawn_of(self._compared())))

    def plot_over_time(self) -> Plot:
        """Plot the GPUs and cores in use and the waiting jobs over time."""
        from cotenant.simulator.clusters.cluster_argument import parse_cluster

        compared = self._compared()
        cluster = parse_cluster(compared.runs.arms[0].scenario.cluster)
        return _drawn(lambda plots: plots.over_time(plots.drawn_of(compared), cluster.gpus, cluster.cores))

    def plot_waits(self) -> Plot:
        """Plot how long jobs waited for what: their share, a place that fits, or any room."""
        return _drawn(lambda plots: plots.waits(self._compared()))

    def plot_by_size(self) -> Plot:
        """Plot completion times by the GPUs that jobs request."""
        return _drawn(lambda plots: plots.by_size(plots.drawn_of(self._compared())))


def _drawn(draw: Callable[[Any], Drawing]) -> Plot:
    """Return what a function of the module of plots draws."""
    try:
        from cotenant.simulator.report import plots
        from cotenant.simulator.report.style import look
    except ModuleNotFoundError as error:
        if not (extra := extras.bringing(error.name or "", ["research"])):
            raise
        raise CotenantError(
            f"plots need {error.name}", reason="MISSING_EXTRA", hint=extras.how_to_install(extra)
        ) from None
    with look():
        made = draw(plots)
    return Plot(made.title, made.caption, made.figure)
