// The policy lab: what other policies would do with today's jobs, simulated from a snapshot.
import { $, duration, el, follow, gap, jobLink, percent, plural, say, sessionEnded } from "./page.js";
import uPlot from "./vendor/uplot.js";

const GROUPS = [["profile", "Profiles: policies that work together"], ["queue", "Order of the queue"], ["placement", "Placement"]];
const SAME_SECONDS = 1;
const board = new Map(), chosen = new Map(); // by kind and name
let asking = null, result = null, plots = [];
const keyOf = (kind, name) => JSON.stringify([kind, name]);
const part = (name) => board.get(name)?.rows || [];

// Before: what there is, and what to try ------------------------------------------------------------------------------

function arrange() {
  for (const [name, words] of [["jobs", "The jobs are"], ["nodes", "The nodes are"], ["queues", "The rules are"], ["policies", "The installed policies are"]]) gap($(`${name}-gap`), board.get(name), words);
  showToday();
  showChoices();
  showButtons();
}

function active(group) { return part("policies").find((one) => one.group === group && one.active)?.name || ""; }

function showToday() {
  const jobs = part("jobs")[0], nodes = part("nodes")[0], queue = part("queues")[0];
  const options = Object.entries(queue?.options || {}).map(([name, value]) => `${name}=${value}`).join(", ");
  const facts = [
    ["Jobs that run or wait", jobs ? jobs.seen.toLocaleString("en") : ""], ["Nodes", nodes ? String(nodes.nodes) : ""], ["GPUs", nodes?.gpus ? String(nodes.gpus) : ""],
    ["Queue policy", queue ? `${queue.policy}${options ? ` (${options})` : ""}` : ""], ["Placement", active("placement")], ["Cores by", active("allocator")],
  ].filter(([, value]) => value);
  $("today").replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  showPartial($("partial"), jobs?.hidden);
}

function showPartial(element, hidden) {
  element.hidden = !hidden;
  if (hidden) say(element, `It is partial: ${plural(hidden, "job")} of other tenants ${hidden === 1 ? "is" : "are"} not in it, for your API token may not see ${hidden === 1 ? "it" : "them"}. What ${hidden === 1 ? "it holds" : "they hold"} counts as free, so jobs start earlier here than they will.`);
}

/** Return the policies that can be tried, by kind; those in use are not. */
function offers(kind) {
  if (kind === "profile") return part("profiles");
  const inUse = kind === "queue" ? part("queues")[0]?.policy : active(kind);
  return part("policies").filter((one) => one.group === kind && one.name !== inUse);
}

function showChoices() {
  const found = GROUPS.map(([kind, title]) => [kind, title, offers(kind)]), key = JSON.stringify(found);
  if ($("choices").dataset.key === key) return;
  $("choices").dataset.key = key;
  const focused = document.activeElement?.value;
  $("choices").replaceChildren(...found.filter(([, , rows]) => rows.length).map(([kind, title, rows]) => el("fieldset", {}, el("legend", {}, title), ...rows.map((one) => choice(kind, one)))));
  if (focused) [...$("choices").querySelectorAll("input")].find((one) => one.value === focused)?.focus();
}

function choice(kind, { name, summary }) {
  const box = el("input", { type: "checkbox", value: keyOf(kind, name) });
  box.checked = chosen.has(box.value);
  box.addEventListener("change", () => { if (box.checked) chosen.set(box.value, [kind, name]); else chosen.delete(box.value); showButtons(); });
  return el("label", { title: summary || "" }, box, el("span", {}, name));
}

/** Return why there is nothing to simulate; "" if there is. */
function refusal() {
  const jobs = part("jobs")[0], most = board.get("limits")?.jobs_max;
  if (!jobs) return "";
  if (jobs.seen > most) return `This snapshot would have ${plural(jobs.seen, "job")}; the lab takes ${most.toLocaleString("en")}. Use cotenant snapshot -o now.json and cotenant compare --from-snapshot now.json --arms A,B, which has no limit.`;
  return jobs.seen ? "" : "No job runs or waits now that your API token may see: there is nothing to simulate.";
}

function showButtons() {
  const why = refusal(), most = board.get("limits")?.others_max || 0;
  $("refusal").hidden = !why;
  say($("refusal"), why);
  for (const box of $("choices").querySelectorAll("input")) box.disabled = Boolean(asking) || (!box.checked && chosen.size >= most);
  $("run").disabled = Boolean(asking || why) || !chosen.size || !part("jobs").length;
  $("run").hidden = Boolean(asking);
  $("stop").hidden = !asking;
  const seconds = (1 + chosen.size) * (board.get("limits")?.policy_seconds || 0);
  const cost = chosen.size && !why && part("jobs").length ? ` This takes at most about ${duration(Math.max(1, seconds))} of processor time.` : "";
  say($("chosen"), asking ? "" : `${chosen.size} of ${most} chosen, beside those in use.${cost}`);
  $("running").hidden = !asking;
}

// A run ---------------------------------------------------------------------------------------------------------------

$("lab").addEventListener("submit", (event) => { event.preventDefault(); if (!asking) run(); });
$("stop").addEventListener("click", () => asking?.abort());
addEventListener("pagehide", () => asking?.abort());

const handlers = {
  snapshot: (told) => say($("state"), `A snapshot of ${plural(told.jobs, "job")} on ${plural(told.nodes, "node")} is taken; simulating.`),
  progress: (told) => { $("progress").value = told.share; say($("state"), `Simulating: ${told.policy}, ${percent(told.share)} of all.`); },
  result: (told) => { result = told; showResult(); say($("state"), "Done: what would happen is above and below."); return true; },
  failed: (told) => { say($("state"), told.why); return true; },
  session: () => { sessionEnded(); say($("state"), "The simulation has stopped with your session."); return true; },
};

async function run() {
  asking = new AbortController();
  $("progress").removeAttribute("value"); // not known yet
  say($("state"), "Taking a snapshot …");
  showButtons();
  $("stop").focus();
  try {
    if (!await read([...chosen.values()], asking.signal)) say($("state"), "The connection was lost, and the simulation has stopped. Start it again.");
  } catch (error) {
    say($("state"), error.name === "AbortError" ? "Stopped." : error instanceof TypeError ? "The dashboard does not answer; the simulation has stopped. Start it again." : error.message);
  }
  const focused = document.activeElement === $("stop") || document.activeElement === document.body;
  asking = null;
  showButtons();
  if (focused) $("run").focus();
}

/** Start a simulation, and follow it; return whether it came to an end. Stopping to read ends it on the server. */
async function read(policies, signal) {
  const csrf = document.querySelector("meta[name=csrf]").content;
  const answer = await fetch("/api/lab", { method: "POST", signal, body: JSON.stringify({ policies }), headers: { "content-type": "application/json", "x-csrf-token": csrf } });
  if (!answer.ok) {
    if (answer.status === 401) sessionEnded();
    throw new Error((await answer.json().catch(() => ({}))).error || `the server answered with ${answer.status}`);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return false;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const [, name, data] = /^event: (\w+)\ndata: (.*)$/s.exec(event) || [];
      if (name && handlers[name]?.(JSON.parse(data))) { reader.cancel(); return true; }
    }
  }
}

// The result ----------------------------------------------------------------------------------------------------------

const change = (seconds) => (seconds === null || seconds === undefined ? "never ends" : Math.abs(seconds) < SAME_SECONDS ? "same" : `${duration(Math.abs(seconds))} ${seconds < 0 ? "sooner" : "later"}`);
const kindOf = (seconds) => (seconds === null || seconds === undefined ? "bad" : Math.abs(seconds) < SAME_SECONDS ? "" : seconds < 0 ? "ok" : "bad");
const changeCell = (seconds) => el("td", { class: "number change", "data-kind": kindOf(seconds) }, change(seconds));
const head = (names) => el("thead", {}, el("tr", {}, ...names.map(([name, number]) => el("th", { scope: "col", class: number ? "number" : "" }, name))));

function showResult() {
  $("result").hidden = false;
  say($("verdict"), verdict());
  document.title = "Policy lab · Cotenant";
  const jobs = result.running + result.waiting;
  say($("words"), `Simulated from ${new Date(1000 * result.taken).toLocaleTimeString()}, when ${result.running.toLocaleString("en")} of these ${plural(jobs, "job")} ran and ${result.waiting.toLocaleString("en")} waited. Nothing was changed.`);
  showFigures();
  showTenants();
  showChanged();
  const hidden = result.hidden ? [`the snapshot is partial: ${plural(result.hidden, "job")} of other tenants ${result.hidden === 1 ? "is" : "are"} not in it, and what ${result.hidden === 1 ? "it holds" : "they hold"} counts as free`] : [];
  $("notes").replaceChildren(...[...hidden, ...result.notes].map((note) => el("li", {}, `${note[0].toUpperCase()}${note.slice(1)}.`)));
  draw();
}

/** Return the most important thing in one sentence: which policy ends jobs soonest, and for whom. */
function verdict() {
  const [base, ...others] = result.policies, known = others.filter((one) => one.change_seconds !== null);
  if (!known.length) return "None of these policies finishes a job";
  const best = known.reduce((one, other) => (other.change_seconds < one.change_seconds ? other : one)), by = best.change_seconds;
  const never = best.never > base.never ? `; but ${plural(best.never - base.never, "more job")} would never end` : "";
  if (Math.abs(by) < SAME_SECONDS) return `These policies change nothing on average: jobs take ${duration(base.avg_jct_seconds)}${never}`;
  const counts = `${plural(best.sooner, "job")} ${best.sooner === 1 ? "ends" : "end"} sooner, ${best.later.toLocaleString("en")} later`;
  if (by > 0) return `What is in use is best: with ${best.label}, the next, jobs end ${duration(by)} later on average${never}`;
  return `With ${best.label}, jobs would end ${duration(-by)} sooner on average: ${counts}${never}`;
}

function showFigures() {
  const least = (name) => Math.min(...result.policies.map((one) => one[name] ?? Infinity));
  const time = (one, name) => {
    const value = one[name], ratio = one.ratios[name];
    return el("td", { class: "number" }, value === null ? "–" : value === least(name) && result.policies.some((other) => other[name] > value) ? el("b", {}, duration(value)) : duration(value),
      one !== result.policies[0] && ratio ? el("div", { class: "muted" }, `×${ratio >= 0.1 ? ratio.toFixed(2) : ratio.toPrecision(2)}`) : "");
  };
  const share = (value) => el("td", { class: "number" }, value === null ? "–" : percent(value)), count = (value) => el("td", { class: "number" }, value.toLocaleString("en"));
  $("figures").replaceChildren(...result.policies.map((one, index) => el("tr", {},
    el("th", { scope: "row" }, el("span", { class: "swatch", "data-series": String(index) }), one.label, el("div", { class: "muted" }, [one.choices.queue, one.choices.placement, one.choices.allocator].join(", ")), one.never ? el("div", { class: "warning" }, `${plural(one.never, "job")} never ${one.never === 1 ? "ends" : "end"}`) : ""),
    time(one, "avg_jct_seconds"), time(one, "median_jct_seconds"), time(one, "p99_jct_seconds"), time(one, "avg_queue_seconds"), share(one.gpu_utilisation), share(one.cpu_utilisation), count(one.preemptions),
    ...(index ? [count(one.sooner), count(one.later)] : [el("td", { class: "number" }, "–"), el("td", { class: "number" }, "–")]))));
}

function showTenants() {
  const others = result.policies.slice(1);
  $("tenants").replaceChildren(head([["Tenant"], ["Jobs", true], ["Mean JCT now", true], ...others.map((one) => [one.label, true])]),
    el("tbody", {}, ...result.tenants.map((one) => el("tr", {}, el("th", { scope: "row" }, el("a", { href: `/tenants/${encodeURIComponent(one.tenant)}` }, one.tenant)), el("td", { class: "number" }, one.jobs.toLocaleString("en")), el("td", { class: "number" }, duration(one.avg_jct_seconds)), ...one.changes.map(changeCell)))));
}

function showChanged() {
  const others = result.policies.slice(1);
  if (!result.jobs.length) { $("changed").replaceChildren(el("tbody", {}, el("tr", {}, el("td", {}, "Every job ends when it would end anyway.")))); return; }
  $("changed").replaceChildren(head([["Job"], ["Ends in", true], ...others.map((one) => [one.label, true])]),
    el("tbody", {}, ...result.jobs.map((one) => el("tr", {}, el("th", { scope: "row" }, jobLink(one.id, one.name), el("div", { class: "muted" }, one.tenant)), el("td", { class: "number" }, duration(one.ends_in_seconds)), ...one.changes.map(changeCell)))));
}

// Charts --------------------------------------------------------------------------------------------------------------

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const COLOURS = ["--text", "--accent", "--amber", "--green", "--red"], DASHES = [[], [], [7, 3], [3, 3], [9, 3, 2, 3]];

const STEPS = [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000, 2592000, 8640000, 86400000]; // seconds

function chart(element, label, name) {
  const axis = (also) => ({ stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px system-ui", labelFont: "11px system-ui", labelSize: 16, ...also });
  const series = result.policies.map((one, index) => ({ label: one.label, stroke: css(COLOURS[index]), dash: DASHES[index], width: index ? 2 : 3, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) }));
  return new uPlot({
    width: element.clientWidth || 600, height: 200, legend: { live: false }, cursor: { drag: { x: false, y: false } },
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, high * 1.1 || 1] } },
    axes: [axis({ label: "time from the snapshot", incrs: STEPS, values: (_, ticks) => ticks.map((one) => (one ? duration(one) : "0")), space: 90 }), axis({ label, size: 56 })],
    series: [{}, ...series],
  }, [result.times, ...result.policies.map((one) => one.series[name])], element);
}

function draw() {
  for (const plot of plots) plot.destroy();
  const held = result.policies.some((one) => one.series.gpus.some(Boolean));
  $("gpus").hidden = !held;
  plots = [chart($("waiting"), "jobs that wait", "waiting"), ...(held ? [chart($("gpus"), "GPUs held", "gpus")] : [])];
}
const redraw = () => { if (result) draw(); };
let sizing = 0;
addEventListener("themechange", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", () => { clearTimeout(sizing); sizing = setTimeout(redraw, 150); });

follow("/events/lab", {
  board(batch) {
    for (const row of batch.rows) board.set(row.id, row);
    arrange();
  },
});
