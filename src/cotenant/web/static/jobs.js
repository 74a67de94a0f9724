// The list of jobs: all of them in memory, the visible ones in the document.
import { $, copyLine, el, expected, follow, now, onKey, plural, say, short } from "./page.js";
import { answers, virtualRows } from "./rows.js";

const jobs = new Map();
const forecasts = answers("/api/forecasts");
const LIVE = ["running", "starting", "stopping"];
const RANK = { running: 0, starting: 1, stopping: 2, queued: 3, suspended: 4, failed: 5, succeeded: 6, cancelled: 7 };
const CHIPS = [["", "All"], ["running", "Running"], ["queued", "Waiting"], ["failed", "Failed"], ["succeeded", "Succeeded"], ["other", "Other"]];
const chipOf = (phase) => (LIVE.includes(phase) ? "running" : ["queued", "failed", "succeeded"].includes(phase) ? phase : "other");

const MERGED_MAX = 500;
let changed = null; // ids of jobs that have changed since the list was arranged; null: so has what it shows
let shown = [], chip = "", words = [], sort = { key: "", down: false }, synced = false, loaded = false, pending = 0;
const scroller = $("scroller"), list = $("list"), filter = $("filter");
const rows = virtualRows({ list, scroller, makeRow, fill, drawn: wantForecasts });

// What is shown -------------------------------------------------------------------------------------------------------

function prepare(job) {
  job.text = [job.name, job.id, job.tenant, job.by, job.phase, job.why, job.code].join("\n").toLowerCase();
  return job;
}

function matches(job) {
  return (!chip || chipOf(job.phase) === chip) && words.every((word) => job.text.includes(word));
}

function compare(a, b) {
  if (sort.key) {
    const [x, y] = sort.key === "phase" ? [RANK[a.phase], RANK[b.phase]] : [a[sort.key] ?? 0, b[sort.key] ?? 0];
    const order = typeof x === "string" || typeof y === "string" ? String(x || "").localeCompare(String(y || "")) : x - y;
    if (order) return sort.down ? -order : order;
  } else {
    const [x, y] = [RANK[a.phase] > 4, RANK[b.phase] > 4];
    if (x !== y) return x - y;
  }
  return (b.made || 0) - (a.made || 0) || (a.id < b.id ? -1 : 1);
}

/** Return the list with the changed jobs in their new places: the others need not be sorted again. */
function merged() {
  const moved = [...changed].map((id) => jobs.get(id)).filter((job) => job && matches(job)).sort(compare), list = [];
  let next = 0;
  for (const job of shown) {
    if (changed.has(job.id)) continue;
    while (next < moved.length && compare(moved[next], job) < 0) list.push(moved[next++]);
    list.push(job);
  }
  return [...list, ...moved.slice(next)];
}

function arrange() {
  pending = 0;
  const counts = {};
  for (const job of jobs.values()) counts[chipOf(job.phase)] = (counts[chipOf(job.phase)] || 0) + 1;
  shown = changed && changed.size < MERGED_MAX ? merged() : [...jobs.values()].filter(matches).sort(compare);
  changed = new Set();
  showHead(counts);
  rows.set(shown);
}

const later = () => { pending ||= requestAnimationFrame(arrange); };

function showHead(counts) {
  const running = counts.running || 0, waiting = counts.queued || 0;
  if (loaded) say($("verdict"), running || waiting ? `${running.toLocaleString("en")} running, ${waiting.toLocaleString("en")} waiting` : "Nothing runs, nothing waits");
  document.title = loaded ? `${running} running, ${waiting} waiting · Cotenant` : document.title;
  if (!$("chips").children.length) {
    $("chips").append(...CHIPS.map(([name, label]) => el("button", { type: "button", "data-chip": name, onclick: () => { chip = name; changed = null; later(); } },
      el("span", {}, label), el("span", { class: "n" }))));
  }
  for (const button of $("chips").children) {
    const name = button.dataset.chip;
    button.setAttribute("aria-pressed", name === chip);
    say(button.querySelector(".n"), (name ? counts[name] || 0 : jobs.size).toLocaleString("en"));
  }
  showEmpty();
}

function showEmpty() {
  const nothing = !shown.length && synced;
  $("empty").hidden = !nothing;
  list.hidden = nothing;
  if (!nothing || $("empty").dataset.of === String(jobs.size > 0)) return;
  $("empty").dataset.of = String(jobs.size > 0);
  if (jobs.size) {
    $("empty").replaceChildren(el("h2", {}, "No job matches"), el("p", {}, el("button", { type: "button", onclick: () => { chip = ""; filter.value = ""; refilter(); } }, "Show all jobs")));
  } else {
    $("empty").replaceChildren(el("h2", {}, "No jobs yet"), el("p", { class: "muted" }, "Submit one, and it appears here:"),
      copyLine("cotenant submit --gpus 1 -- python3 -c 'print(42)'"));
  }
}

// Rows ----------------------------------------------------------------------------------------------------------------

function makeRow() {
  const cell = (name, ...children) => el("span", { role: "cell", class: name }, ...children);
  const link = el("a", {}), id = el("code", { class: "id" }), phase = el("span", { class: "phase" });
  const cells = { tenant: cell("c-tenant"), gpus: cell("c-gpus number"), cores: cell("c-cores number"), why: cell("c-why"), eta: cell("c-eta"), age: cell("c-age number") };
  const root = el("div", { role: "row", class: "row" }, cell("c-name", link, id), cell("c-phase", phase), ...Object.values(cells));
  return { root, link, id, phase, ...cells };
}

function fill(row, job, changed) {
  if (changed) {
    row.link.href = `/jobs/${encodeURIComponent(job.id)}`;
    say(row.link, job.name || job.id);
    say(row.id, job.name ? job.id : "");
    row.phase.dataset.phase = job.phase;
    say(row.phase, job.phase);
    say(row.tenant, job.tenant || "–");
    say(row.gpus, job.gpus ? String(job.gpus) : "–");
    say(row.cores, job.cores ? String(job.cores) : "auto");
    say(row.why, job.why || "");
    row.why.title = job.why || "";
  }
  const end = job.ended || 0;
  const eta = end ? null : expected(job.phase, forecasts.known.get(job.id));
  say(row.eta, end ? `${short(now() - end)} ago` : eta?.words || "");
  say(row.age, short(now() - (job.made || now())));
}

function wantForecasts() {
  forecasts.want(rows.visible().filter((job) => job.phase === "queued" || LIVE.includes(job.phase)).map((job) => job.id));
}

// Keys and controls ---------------------------------------------------------------------------------------------------

onKey("/", () => filter.focus());
function refilter() { words = filter.value.toLowerCase().split(/\s+/).filter(Boolean); scroller.scrollTop = 0; changed = null; later(); }
for (const name of ["input", "search"]) filter.addEventListener(name, refilter); // Escape clears it without an input
for (const head of list.querySelectorAll("[data-sort]")) {
  head.firstElementChild.addEventListener("click", () => {
    const key = head.dataset.sort, first = ["gpus", "cores", "made"].includes(key);
    sort = sort.key !== key ? { key, down: first } : sort.down === first ? { key, down: !first } : { key: "", down: false };
    for (const other of list.querySelectorAll("[data-sort]")) {
      if (other.dataset.sort === sort.key) other.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      else other.removeAttribute("aria-sort");
    }
    changed = null;
    later();
  });
}

// Changes -------------------------------------------------------------------------------------------------------------

follow("/events/jobs", {
  jobs(batch) {
    if (batch.whole) { jobs.clear(); changed = null; }
    for (const job of batch.rows) { jobs.set(job.id, prepare(job)); changed?.add(job.id); }
    for (const id of batch.removed) { jobs.delete(id); changed?.add(id); }
    loaded ||= jobs.size > 0;
    if (!batch.more) later();
  },
}, {
  onMeta(row) {
    if (row.id === "watch") { synced = row.synced; loaded ||= synced; later(); }
    if (row.id === "capacity") {
      say($("capacity"), row.trouble ? `Nodes are unknown: ${row.trouble}` : row.nodes ? `${row.gpus_used} of ${plural(row.gpus, "GPU")} and ${row.cores_used} of ${plural(row.cores, "core")} in use on ${plural(row.nodes, "node")}` : "No node has joined yet");
    }
  },
});
