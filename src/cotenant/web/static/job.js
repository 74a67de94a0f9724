// One job: why, until when, what it does, and what could be otherwise.
import { $, ask, duration, el, expected, follow, now, onKey, plural, say, sessionEnded, short } from "./page.js";
import uPlot from "./vendor/uplot.js";

const root = $("job"), id = root.dataset.id, base = encodeURIComponent(id);
const ENDED = ["succeeded", "failed", "cancelled"], LIVE = ["starting", "running", "stopping"];
const sentence = (text) => (text ? text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".") : "");
let view = null;

// What is told --------------------------------------------------------------------------------------------------------

function show(next) {
  const first = view === null;
  view = next;
  const job = view.job;
  $("phase").dataset.phase = job.phase;
  say($("phase"), job.phase);
  const waits = job.phase === "queued" && job.reason?.detail;
  say($("summary"), waits ? `Waiting: ${job.reason.detail}.` : sentence(view.summary));
  say($("remedy"), waits ? sentence(job.reason.remedy) : "");
  showActions(job);
  showExpected();
  showFacts(job);
  showEvents();
  showNodes(job);
  showAhead();
  showCurve();
  if (first) prepareWhatIf(job);
  showRanks();
  if (job.attempt && (job.attempt.number !== logAttempt)) openLog();
  $("log-card").hidden = !job.attempt;
}

function showActions(job) {
  const ended = ENDED.includes(job.phase);
  if ($("shell")) $("shell").hidden = job.phase !== "running";
  for (const form of document.querySelectorAll("[data-action]")) {
    const name = form.dataset.action;
    if (name === "rerun") form.hidden = !ended;
    else form.hidden = ended || (name === "resume") !== (job.phase === "suspended") && name !== "cancel";
    if (name === "suspend") say(form.querySelector("button"), job.phase === "queued" ? "Hold" : "Suspend");
  }
  if ($("priority-form")) $("priority-form").hidden = ended;
}

function showExpected() {
  const job = view.job, eta = expected(job.phase, view);
  const known = eta && !eta.unknown;
  $("eta-card").hidden = !known && !(view.outlook && !ENDED.includes(job.phase));
  say($("eta-words"), known ? `${eta.verb === "starts" ? "Starts" : "Ends"} in about ${duration(eta.median)}` : sentence(view.outlook));
  $("eta-words").classList.toggle("big", Boolean(known));
  const banded = known && eta.high !== null && eta.high > 0;
  $("eta-band").hidden = $("eta-ends").hidden = !banded;
  if (banded) {
    const end = Math.max(eta.high * 1.15, 1), share = (value) => `${Math.min(100, (100 * value) / end)}%`;
    const [range, median] = $("eta-band").children;
    range.style.left = share(eta.low);
    range.style.width = share(Math.max(eta.high - eta.low, end / 200));
    median.style.left = share(eta.median);
    $("eta-ends").replaceChildren(el("span", {}, "now"), el("span", {}, `in ${duration(end)}`));
  }
  const lines = [];
  if (banded) lines.push(eta.high - eta.low < 1 ? "All futures agree." : `8 of 10 times between ${duration(eta.low)} and ${duration(eta.high)} from now.`);
  if (known && eta.draws === 0) lines.push("Estimated from the work ahead of it.");
  if (known && eta.draws > 1) lines.push(`From ${eta.draws} simulated futures.`);
  if (known && eta.confidence !== undefined) lines.push(`The predictor is ${Math.round(100 * eta.confidence)} % sure.`);
  if (view.estimate?.source && known && eta.verb === "ends") lines.push(sentence(view.estimate.source));
  if (view.position) lines.push(`Place ${view.position} of ${view.waiting} waiting.`);
  say($("eta-sure"), lines.join(" "));
}

function showFacts(job) {
  const facts = [
    ["Tenant", job.tenant], ["Submitter", job.submitter], ["Queue", job.queue], ["Kind", job.kind],
    ["Priority", job.priority_class ? `${job.priority} (${job.priority_class})` : String(job.priority)],
    ["Replicas", String(job.replicas)], ["GPUs", job.gpus ? String(job.gpus) : "none"], ["Cores", job.cores === null ? "automatic" : String(job.cores)],
    ["Nodes", job.nodes.join(", ")], ["Waited", duration(job.wait_seconds)], ["Ran", job.run_seconds ? duration(job.run_seconds) : ""],
    ["Attempt", job.attempt ? String(job.attempt.number) : ""], ["Failures", job.failures ? `${job.failures} of ${job.retries + 1}` : ""],
    ["Preemptions", job.preemptions ? String(job.preemptions) : ""], ["Step", job.progress ? `${job.progress.step}${job.progress.steps ? ` of ${job.progress.steps}` : ""}` : ""],
    ["Rate", job.progress?.rate_per_second ? `${job.progress.rate_per_second.toPrecision(3)} steps/s` : ""],
    ["Cores by", view.summary.includes(view.sizing) ? "" : view.sizing], ["Deadline", job.deadline ? new Date(job.deadline).toLocaleString() : ""],
    ...job.objectives.map((one) => [`Objective: ${one.kind}`, `${one.state}`]),
  ].filter(([, value]) => value);
  const list = $("facts");
  if (list.dataset.shown === JSON.stringify(facts)) return;
  list.dataset.shown = JSON.stringify(facts);
  list.replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function showEvents() {
  const list = $("events"), key = JSON.stringify(view.events);
  if (list.dataset.key !== key) {
    list.dataset.key = key;
    list.replaceChildren(...[...view.events].reverse().map((event) => el("li", {},
      el("time", { datetime: event.time, title: event.time }), el("b", {}, event.kind.replaceAll("_", " ")), event.detail ? el("p", {}, event.detail) : "")));
  }
  for (const time of list.querySelectorAll("time")) say(time, `${short(now() - Date.parse(time.dateTime) / 1000)} ago`);
}

function showNodes(job) {
  const nodes = view.nodes || [], roomy = nodes.filter((one) => !one.constraint).length;
  $("nodes-card").hidden = job.phase !== "queued" || !nodes.length;
  say($("nodes-words"), [...view.scheduler, `By their own reports, ${nodes.length === 1 ? (roomy ? "the only node has" : "the only node does not have") : `${roomy} of ${plural(nodes.length, "node")} ${roomy === 1 ? "has" : "have"}`} room for a replica now.`].join(" "));
  const body = $("nodes"), key = JSON.stringify(nodes);
  if (body.dataset.key === key) return;
  body.dataset.key = key;
  body.replaceChildren(...nodes.slice(0, 200).map((one) => el("tr", {}, el("td", {}, el("code", {}, one.node)),
    el("td", {}, el("span", { class: "tag", "data-kind": one.constraint ? "warn" : "ok" }, one.constraint || "room")), el("td", {}, one.detail))));
}

function showAhead() {
  const waits = view.ending.length ? view.ending : view.ahead;
  $("ahead-card").hidden = !waits.length;
  say($("ahead-title"), view.ending.length ? "Must end first" : "Ahead of it");
  $("ahead").replaceChildren(...waits.map((one) => el("li", {}, el("a", { href: `/jobs/${encodeURIComponent(one.id)}` }, one.name || one.id), el("span", { class: "muted" }, ` · ${one.needs}`))));
}

// Charts --------------------------------------------------------------------------------------------------------------

const samples = new Map();
let rates = null, losses = null, curve = null, curveKey = "";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const axis = (label, also = {}) => ({ label, stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px system-ui", labelFont: "11px system-ui", labelSize: 16, ...also });
const stepped = uPlot.paths.stepped({ align: 1 });

function showRates() {
  const rows = [...samples.values()].sort((a, b) => a[0] - b[0]);
  const enough = rows.length > 1;
  $("charts-card").hidden = !enough && !curveKey;
  if (!enough) return;
  say($("rates-words"), `Since ${new Date(rows[0][0] * 1000).toLocaleTimeString()}, when this dashboard began to watch it or the job began to report.`);
  const data = [rows.map((row) => row[0]), rows.map((row) => row[1]), rows.map((row) => row[2])];
  showLosses(rows.filter((row) => row[4] !== null && row[4] !== undefined));
  if (rates) { rates.setData(data); return; }
  rates = new uPlot({
    width: $("rates").clientWidth || 600, height: 200, legend: { live: false }, cursor: { drag: { x: false, y: false } },
    scales: { x: { time: true }, rate: { range: (_, low, high) => [0, high * 1.15 || 1] }, cores: { range: (_, low, high) => [0, Math.max(high * 1.4, 1)] } },
    axes: [axis("", { label: undefined }), axis("steps per second", { scale: "rate", size: 56 }), axis("cores", { scale: "cores", side: 1, grid: { show: false }, size: 44 })],
    series: [{}, { label: "Rate", scale: "rate", stroke: css("--accent"), width: 2, points: { show: false } },
      { label: "Cores", scale: "cores", stroke: css("--amber"), width: 1.5, dash: [5, 4], paths: stepped, points: { show: false } }],
  }, data, $("rates"));
}

function showLosses(rows) {
  if (rows.length < 2) return;
  const data = [rows.map((row) => row[0]), rows.map((row) => row[4])];
  if (losses) { losses.setData(data); return; }
  losses = new uPlot({
    width: $("losses").clientWidth || $("rates").clientWidth || 600, height: 160, legend: { live: false }, cursor: { drag: { x: false, y: false } },
    scales: { x: { time: true } }, axes: [axis("", { label: undefined }), axis("loss", { size: 56 })],
    series: [{}, { label: "Loss", stroke: css("--green"), width: 2, points: { show: false } }],
  }, data, $("losses"));
}

function showCurve() {
  const points = [...(view.curve || [])].sort((a, b) => a.cores - b.cores), theta = view.estimate?.cores_useful || 0, key = JSON.stringify([points, theta]);
  if (points.length < 2 || key === curveKey) return;
  curveKey = key;
  $("charts-card").hidden = false;
  curve?.destroy();
  say($("curve-words"), theta ? `θ = ${plural(theta, "core")} per replica (the dashed line${points.some((one) => one.cores >= theta) ? "" : ", right of the curve"}): more do not help.` : "θ, the number of cores beyond which more do not help, is not known yet.");
  curve = new uPlot({
    width: $("curve").clientWidth || $("job").clientWidth - 40, height: 180, legend: { show: false }, cursor: { drag: { x: false, y: false } },
    hooks: { draw: [(plot) => markTheta(plot, theta)] },
    scales: { x: { time: false, range: (_, low, high) => [Math.min(low, theta || low), Math.max(high, theta)] }, y: { range: (_, low, high) => [0, high * 1.15 || 1] } },
    axes: [axis("cores per replica"), axis("learned steps/s", { size: 56 })],
    series: [{ label: "Cores" }, { label: "Rate", stroke: css("--accent"), width: 2, points: { show: true, size: 6 } }],
  }, [points.map((one) => one.cores), points.map((one) => one.rate)], $("curve"));
}

/** Mark θ on the curve, with a line and its letter. */
function markTheta(plot, theta) {
  if (!theta) return;
  const { ctx, bbox } = plot, x = Math.round(plot.valToPos(theta, "x", true)), ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("--amber");
  ctx.lineWidth = 1.5 * ratio;
  ctx.setLineDash([5 * ratio, 4 * ratio]);
  ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
  ctx.font = `600 ${13 * ratio}px system-ui`;
  ctx.textBaseline = "top";
  ctx.textAlign = x > bbox.left + bbox.width / 2 ? "right" : "left";
  ctx.fillText("θ", x + (ctx.textAlign === "right" ? -6 : 6) * ratio, bbox.top + bbox.height - 18 * ratio);
  ctx.restore();
}

function redraw() {
  rates?.destroy(); losses?.destroy(); curve?.destroy();
  rates = losses = curve = null; curveKey = "";
  showRates();
  if (view) showCurve();
}
addEventListener("themechange", redraw);
let sizing = 0;
addEventListener("resize", () => { clearTimeout(sizing); sizing = setTimeout(redraw, 150); });

// Output --------------------------------------------------------------------------------------------------------------

const LINES_MAX = 3000;
let source = null, logAttempt = 0, fresh = false;
const log = $("log"), begun = el("div", {}), gang = () => (view?.job.replicas || 1) > 1 && !$("rank").value;

/** Offer the ranks of the present attempt; one that it does not have is no longer chosen. */
function showRanks() {
  const found = view.ranks, key = JSON.stringify(found), chosen = $("rank").value;
  $("rank-label").hidden = found.length < 2;
  if ($("rank").dataset.key === key) return;
  $("rank").dataset.key = key;
  $("rank").replaceChildren(el("option", { value: "" }, "all"), ...found.map((one) => el("option", { value: String(one.rank) }, [String(one.rank), one.role, one.node].filter(Boolean).join(" · "))));
  $("rank").value = found.some((one) => String(one.rank) === chosen) ? chosen : "";
}

const wanted = () => $("find").value.trim().toLowerCase();

function line(rank, text) {
  const found = el("div", {}, gang() ? el("span", { class: "rank" }, `[${rank}]`) : "", text || " ");
  found.hidden = !matches(found);
  return found;
}

const matches = (row) => !wanted() || row.textContent.toLowerCase().includes(wanted());

/** Show the lines that have the words of the filter; those that come later too. */
function showMatching() {
  for (const row of log.querySelectorAll(":scope > div:not(.mark), :scope > div > div")) if (row !== begun) row.hidden = !matches(row);
  showFound();
}

function showFound() {
  const rows = wanted() ? [...log.querySelectorAll("div")].filter((row) => row !== begun) : [];
  say($("found"), wanted() ? `${rows.filter((row) => !row.hidden).length.toLocaleString("en")} of ${plural(rows.length, "line")}` : "");
  if ($("stick").checked) log.scrollTop = log.scrollHeight;
}

function openLog() {
  closeLog();
  logAttempt = view.job.attempt.number;
  const rank = $("rank").value;
  source = new EventSource(`/events/jobs/${base}/logs${rank ? `?rank=${rank}` : ""}`);
  source.addEventListener("begin", () => { fresh = true; say($("log-state"), "live; nothing written so far"); });
  source.addEventListener("lines", (event) => add(JSON.parse(event.data)));
  source.addEventListener("end", (event) => {
    closeLog();
    if (fresh) log.replaceChildren();
    const { why } = JSON.parse(event.data);
    say($("log-state"), why || (log.childElementCount ? "This is all of its output." : "It has written nothing."));
  });
  source.addEventListener("session", () => { closeLog(); sessionEnded(); });
  source.onerror = () => say($("log-state"), "The stream was cut; when it is back, it begins anew with the end of the output.");
}

function closeLog() { source?.close(); source = null; }

function add(batch) {
  if (fresh) { fresh = false; log.replaceChildren(); say($("log-state"), "live"); }
  begun.remove();
  const lines = document.createDocumentFragment();
  if (batch.dropped) lines.append(el("div", { class: "mark" }, `… ${plural(batch.dropped, "line")} left out: the output is faster than this page`));
  for (const [rank, text] of batch.lines) lines.append(line(rank, text));
  log.append(lines);
  begun.replaceChildren(...batch.begun.map(([rank, text]) => line(rank, text)));
  log.append(begun);
  while (log.childElementCount > LINES_MAX) log.firstElementChild.remove();
  showFound();
}
$("find").addEventListener("input", showMatching);
onKey("/", () => $("find").focus());
$("rank").addEventListener("change", () => { if ($("shell")) $("shell").search = $("rank").value && `?rank=${$("rank").value}`; });
$("rank").addEventListener("change", () => { if (view?.job.attempt) openLog(); });
$("stick").addEventListener("change", () => { if ($("stick").checked) log.scrollTop = log.scrollHeight; });
document.addEventListener("visibilitychange", () => {
  if (document.hidden) { if (source) { closeLog(); logAttempt = 0; } }
  else if (view?.job.attempt && !logAttempt) openLog();
});

// What if -------------------------------------------------------------------------------------------------------------

const sliders = ["gpus", "cores", "priority", "deadline"];
const sliderWords = (name) => (name !== "deadline" ? $(`if-${name}`).value : $("if-deadline").value === "0" ? "no deadline" : plural(Number($("if-deadline").value), "hour"));
let moved = 0, question = 0;

function prepareWhatIf(job) {
  const each = (value) => (value ? value / (job.replicas || 1) : 0);
  const values = { gpus: each(job.gpus), cores: Math.max(1, Math.round(each(job.cores))), priority: job.priority, deadline: job.deadline ? Math.max(0, Math.round((Date.parse(job.deadline) / 1000 - now()) / 3600)) : 0 };
  if (values.gpus % 1) $("if-gpus").step = "0.1";
  $("if-gpus").max = Math.max(8, 2 * values.gpus);
  $("if-cores").max = Math.max(32, 2 * values.cores);
  for (const name of sliders) {
    $(`if-${name}`).value = values[name];
    say($(`out-${name}`), name === "cores" && job.cores === null ? "automatic" : sliderWords(name));
  }
}

for (const name of sliders) {
  $(`if-${name}`).addEventListener("input", () => {
    say($(`out-${name}`), sliderWords(name));
    $(`if-${name}`).dataset.moved = "yes";
    clearTimeout(moved);
    moved = setTimeout(whatIf, 120);
  });
}

async function whatIf() {
  const number = ++question, wanted = {};
  for (const name of sliders) if ($(`if-${name}`).dataset.moved) wanted[name] = Number($(`if-${name}`).value);
  let parts;
  try {
    const answer = await ask(`/api/jobs/${base}/whatif`, wanted);
    const nodes = [...new Set(answer.allocations.map((one) => one.node))];
    parts = answer.starts_now
      ? [el("p", { class: "yes" }, `It would start now on ${nodes.slice(0, 3).join(", ")}${nodes.length > 3 ? ` and ${nodes.length - 3} more` : ""}.`)]
      : [el("p", { class: "no" }, answer.outlook || "It would wait."), el("p", {}, answer.reason ? answer.reason.detail : ""), el("p", { class: "muted" }, answer.reason?.remedy || "")];
    if (answer.preempted_job_ids.length) parts.push(el("p", {}, `It would preempt ${plural(answer.preempted_job_ids.length, "job")}.`));
    if (answer.delayed_count) parts.push(el("p", {}, `It would delay ${plural(answer.delayed_count, "job")}.`));
  } catch (error) {
    parts = [el("p", { class: "no" }, error.message)];
  }
  if (number === question) $("if-answer").replaceChildren(...parts);
}

// Actions -------------------------------------------------------------------------------------------------------------

document.querySelector("[data-action=cancel]")?.addEventListener("submit", (event) => {
  if ($("confirm").open) return;
  event.preventDefault();
  $("confirm").showModal();
});
$("confirm-no").addEventListener("click", () => $("confirm").close());
$("confirm-yes").addEventListener("click", () => document.querySelector("[data-action=cancel]").requestSubmit());

setInterval(() => { if (view && !document.hidden) { showExpected(); showEvents(); } }, 1000);
follow(`/events/jobs/${base}`, {
  job(batch) { for (const row of batch.rows) show(row); },
  samples(batch) {
    if (batch.whole) samples.clear();
    for (const row of batch.rows) samples.set(row[0], row);
    while (samples.size > 600) samples.delete(samples.keys().next().value);
    showRates();
  },
});
