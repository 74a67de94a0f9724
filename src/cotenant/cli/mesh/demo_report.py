"""The demo's report: one self-contained HTML page with a chart of cores and GPUs over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#b07d12", "#e15759", "#9c755f")
ROW, LEFT, WIDTH, TOP = 30, 110, 860, 26


@dataclass(frozen=True, slots=True)
class Bar:
    """A job's time on one core or GPU of a node; seconds since the demo's start."""

    lane: str
    job: str
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the summary."""

    job: str
    shows: str
    phase: str
    gpus: str
    cores: str
    wait: str
    run: str
    rate: str
    where: str


STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1000px;margin:2.5em auto;padding:0 1em}
h1{font-size:1.6em;margin-bottom:.1em} h2{font-size:1.15em;margin-top:2em} .sub{color:#666;margin-top:0}
table{border-collapse:collapse;width:100%;font-size:14px} th{text-align:left;color:#666;font-weight:600}
th,td{padding:.35em .7em .35em 0;border-bottom:1px solid #eee;vertical-align:top}
td:first-child,th{white-space:nowrap} td.n,th.n{text-align:right}
.succeeded{color:#2e7d32}.failed,.refused{color:#c62828} code{background:#f4f4f4;padding:.1em .3em;border-radius:3px}
svg text{font:12px system-ui,sans-serif} @media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}
th,.sub{color:#999} th,td{border-color:#333} code{background:#262626} svg text.axis{fill:#aaa}}
"""


def page(lines: Sequence[Line], bars: Sequence[Bar], replay: Sequence[tuple[str, str, str, str]], machine: str) -> str:
    """Return the whole page."""
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Cotenant demo</title>
<meta name="viewport" content="width=device-width"><style>{STYLE}</style>
<h1>What the demo did</h1><p class="sub">{escape(machine)}</p>
<h2>Cores and GPUs over time</h2>{chart(bars)}
<h2>Jobs</h2>{_jobs(lines)}
<h2>A public trace, replayed by the same scheduler</h2>
<p>260 jobs of a Microsoft cluster (ITP, 2021, MIT license) on two simulated servers of 8 GPUs.</p>{_replay(replay)}
<h2>Next</h2><p><code>cotenant up --gpus fake:4</code> starts the mesh;
<code>cotenant submit --gpus 1 --wait -- python3 train.py</code> runs a job on it;
<code>cotenant explain ID</code> explains why a job waits.</p></html>
"""


def chart(bars: Sequence[Bar]) -> str:
    """Return the lanes over time as SVG."""
    lanes = sorted({bar.lane for bar in bars}, key=lambda lane: (lane.split()[0] != "core", lane))
    names = list(dict.fromkeys(bar.job for bar in sorted(bars, key=lambda bar: bar.begin_seconds)))
    colors = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}
    end = max((bar.end_seconds for bar in bars), default=1.0)
    height = TOP + ROW * len(lanes) + 8
    drawn = [f'<svg viewBox="0 0 {LEFT + WIDTH + 20} {height}" role="img" aria-label="cores and GPUs over time">']
    step = next(s for s in (1, 2, 5, 10, 20, 60, 600) if end / s <= 12 or s == 600)
    for tick in range(0, int(end) + 1, step):
        x = LEFT + WIDTH * tick / end
        drawn.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height - 8}" stroke="#8884"/>')
        drawn.append(f'<text class="axis" x="{x:.1f}" y="{TOP - 10}" text-anchor="middle">{tick} s</text>')
    for row, lane in enumerate(lanes):
        y = TOP + ROW * row
        drawn.append(f'<text class="axis" x="{LEFT - 8}" y="{y + 19}" text-anchor="end">{escape(lane)}</text>')
    for bar in bars:
        x, y = LEFT + WIDTH * bar.begin_seconds / end, TOP + ROW * lanes.index(bar.lane)
        width = max(2.0, WIDTH * (bar.end_seconds - bar.begin_seconds) / end)
        label = bar.job if width > 7 * len(bar.job) + 8 else ""
        title = f"{bar.job}: {bar.begin_seconds:.1f}–{bar.end_seconds:.1f} s"
        drawn.append(
            f'<g><title>{escape(title)}</title><rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{ROW - 6}" '
            f'rx="3" fill="{colors[bar.job]}"/>'
            f'<text x="{x + 6:.1f}" y="{y + 19}" fill="#fff">{escape(label)}</text></g>'
        )
    return "".join(drawn) + "</svg>"


def _jobs(lines: Sequence[Line]) -> str:
    head = "".join(
        f"<th{kind}>{title}</th>"
        for title, kind in (
            ("Job", ""),
            ("What it shows", ""),
            ("Result", ""),
            ("GPUs", ' class="n"'),
            ("Cores", ' class="n"'),
            ("Waited", ' class="n"'),
            ("Ran", ' class="n"'),
            ("Steps/s", ' class="n"'),
            ("Cores / reason", ""),
        )
    )
    rows = "".join(
        f'<tr><td>{escape(line.job)}</td><td>{escape(line.shows)}</td><td class="{line.phase}">{line.phase}</td>'
        + "".join(
            f'<td class="n">{escape(cell)}</td>' for cell in (line.gpus, line.cores, line.wait, line.run, line.rate)
        )
        + f"<td>{escape(line.where)}</td></tr>"
        for line in lines
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _replay(rows: Sequence[tuple[str, str, str, str]]) -> str:
    titles = ("Average JCT", "Median JCT", "Preemptions")
    head = "<tr><th>Queue policy</th>" + "".join(f'<th class="n">{title}</th>' for title in titles) + "</tr>"
    body = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{escape(mean)}</td><td class="n">{escape(median)}</td>'
        f'<td class="n">{escape(preempted)}</td></tr>'
        for name, mean, median, preempted in rows
    )
    return f"<table>{head}{body}</table>"
