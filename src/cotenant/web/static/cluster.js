// The cluster: a map of all nodes, and below it each node as cores and GPUs by NUMA node, coloured by job.
import { $, copyLine, duration, el, expected, follow, gap, now, onKey, plural, say } from "./page.js";
import { cell, css, heightOf, look, newTheme, paintNode } from "./cells.js";
import { virtualCards } from "./cards.js";
import { answers } from "./rows.js";

const LEGEND_MAX = 40, CARD_LEAST = 260, PADDING = 12, LINE = 20, TILE = 14, SPACE = 3, DAY_MINUTES = 1440;
const WORDS = { ready: "ready", cordoned: "cordoned", draining: "draining", away: "disconnected", lost: "lost" };
const MODES = { held: "held by jobs", use: "GPU or CPU in use", bandwidth: "memory bandwidth in use", pressure: "stalled by CPU, memory or I/O" };
const nodes = new Map(), heat = new Map(), places = new Map(), dirty = new Set();
const byName = new Intl.Collator("en", { numeric: true }).compare;
const forecasts = answers("/api/forecasts", () => { if (minutes > 0) redrawAll(); });
let sorted = [], capacity = null, heatState = null, mode = "held", minutes = 0, past = null, ending = new Set();
let pending = 0, unsorted = false, remap = true, columns = 1, shown = [];
const grid = virtualCards({ list: $("cluster-nodes"), least: CARD_LEAST, makeCard, fill, heightOf: cardHeight, drawn(items) { shown = items; foretell(); } });

const jobsOf = (node) => (past ? past[node.id] || [] : node.jobs);

// Updates come together in the next frame ------------------------------------------------------------------------------

const later = () => { pending ||= requestAnimationFrame(update); };
function redrawAll() { remap = true; later(); }

function update() {
  pending = 0;
  if (unsorted) {
    sorted = [...nodes.values()].sort((a, b) => byName(a.id, b.id));
    places.clear();
    sorted.forEach((node, at) => places.set(node.id, at));
    remap = true;
  }
  if (remap) { drawMap(); grid.set(sorted); }
  else for (const id of dirty) { const at = places.get(id); if (at !== undefined) { sorted[at] = nodes.get(id); drawTile(at); grid.put(at, sorted[at]); } }
  unsorted = remap = false;
  dirty.clear();
  legend();
  verdict();
}

// The map: one canvas for all nodes, of which only the tiles that have changed are drawn again -----------------------------

const map = $("map"), ctx = map.getContext("2d");

function share(node) {
  const one = heat.get(node.id);
  if (mode === "use") return one ? Math.max(one.gpu ?? 0, one.cpu ?? 0) / 100 : null;
  if (mode === "bandwidth" || mode === "pressure") return one?.[mode] === null || one?.[mode] === undefined ? null : one[mode] / 100;
  const jobs = jobsOf(node).filter((job) => !ending.has(job.id)), gpus = node.numa.reduce((sum, part) => sum + part.gpus.length, 0), cores = node.numa.reduce((sum, part) => sum + part.cores.length, 0);
  if (past || ending.size) return gpus ? jobs.reduce((sum, job) => sum + job.gpus.reduce((more, [, milli]) => more + milli, 0), 0) / 1000 / gpus : cores ? jobs.reduce((sum, job) => sum + job.cores.length, 0) / cores : 0;
  return gpus ? node.gpus_used / gpus : cores ? node.cores_used / cores : 0;
}

const scale = () => css("--heat").split(" "); // one hue, so that it is read without telling hues apart
const colourOf = (value) => { const all = scale(); return all[Math.min(all.length - 1, Math.floor(value * all.length))]; };

function drawMap() {
  const width = map.parentElement.clientWidth, ratio = devicePixelRatio || 1;
  columns = Math.max(1, Math.floor((width + SPACE) / (TILE + SPACE)));
  const height = Math.max(1, Math.ceil(sorted.length / columns)) * (TILE + SPACE);
  map.width = Math.round(width * ratio);
  map.height = Math.round(height * ratio);
  map.style.height = `${height}px`;
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  sorted.forEach((_, at) => drawTile(at));
  map.setAttribute("aria-label", `Map of ${plural(sorted.length, "node")}: ${MODES[mode]}. The nodes follow as a list.`);
}

function drawTile(at) {
  const node = sorted[at], value = share(node), x = (at % columns) * (TILE + SPACE), y = Math.floor(at / columns) * (TILE + SPACE);
  ctx.clearRect(x, y, TILE + SPACE, TILE + SPACE);
  ctx.beginPath();
  ctx.roundRect(x + 0.5, y + 0.5, TILE - 1, TILE - 1, 3);
  ctx.fillStyle = value ? colourOf(value) : css("--raised");
  ctx.fill();
  ctx.strokeStyle = node.state === "ready" ? css("--line") : css("--red");
  ctx.lineWidth = node.state === "ready" ? 1 : 2;
  ctx.stroke();
  if (node.state !== "ready") { ctx.beginPath(); ctx.moveTo(x + 3, y + TILE - 3); ctx.lineTo(x + TILE - 3, y + 3); ctx.stroke(); }
  else if (value === null) { ctx.fillStyle = css("--muted"); ctx.fillRect(x + TILE / 2 - 1, y + TILE / 2 - 1, 2, 2); }
}

function nodeAt(event) {
  const x = Math.floor(event.offsetX / (TILE + SPACE)), y = Math.floor(event.offsetY / (TILE + SPACE));
  return x < columns ? sorted[y * columns + x] : undefined;
}

const heatWords = (one) => (one ? [["GPU", one.gpu], ["CPU", one.cpu], ["bandwidth", one.bandwidth], ["stalled", one.pressure]].filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => `${name} ${value} %`).join(", ") : "");
const useWords = (node) => {
  const gpus = node.numa.reduce((sum, part) => sum + part.gpus.length, 0), cores = node.numa.reduce((sum, part) => sum + part.cores.length, 0);
  return [gpus ? `${node.gpus_used} of ${plural(gpus, "GPU")}` : "", `${node.cores_used} of ${plural(cores, "core")}`].filter(Boolean).join(" · ");
};

map.addEventListener("pointermove", (event) => {
  const node = nodeAt(event);
  map.title = node ? [node.id, WORDS[node.state] || node.state, useWords(node), heatWords(heat.get(node.id))].filter(Boolean).join(" · ") : "";
});
map.addEventListener("click", (event) => { const node = nodeAt(event); if (node) grid.show(node.id); });

// Cards ---------------------------------------------------------------------------------------------------------------

const whyOf = (node) => [node.why, ...node.numa.flatMap((part) => part.gpus).filter((gpu) => gpu.ill).map((gpu) => `GPU ${gpu.uuid.slice(0, 12)}: ${gpu.ill}`), ...node.problems.map((one) => one.reason)].filter(Boolean).join(" · ");

function cardHeight(node, width) {
  return 2 * PADDING + 2 + 24 + 2 * LINE + (whyOf(node) ? LINE : 0) + 8 + heightOf(node, Math.floor(width - 2 * PADDING - 2));
}

function makeCard() {
  const card = { link: el("button", { type: "button", class: "node-name", onclick: () => open(card.item) }), state: el("span", { class: "tag" }), use: el("p", { class: "muted" }), heat: el("p", { class: "muted" }), why: el("p", { class: "warning" }), canvas: el("canvas", { "aria-hidden": true }) };
  card.root = el("li", { class: "node" }, el("div", { class: "node-head" }, card.link, card.state), card.use, card.heat, card.why, card.canvas);
  return card;
}

function fill(card, node, width) {
  const jobs = jobsOf(node), why = whyOf(node), named = jobs.length ? plural(jobs.length, "job") : "no job";
  card.root.dataset.state = node.state;
  say(card.link, node.id);
  card.link.title = node.id;
  say(card.state, WORDS[node.state] || node.state);
  card.state.dataset.kind = node.state === "ready" ? "ok" : node.state === "lost" || node.state === "away" ? "bad" : "warn";
  say(card.use, past ? `${named} then` : `${useWords(node)} · ${named}`);
  say(card.heat, past ? "" : heatWords(heat.get(node.id)) || "no sample");
  say(card.why, why);
  card.why.title = why;
  card.why.hidden = !why;
  paintNode(card.canvas, node, jobs, Math.floor(width - 2 * PADDING - 2), ending);
}

/** Show what is on a node, with links. */
function open(node) {
  const known = node.jobs.reduce((sum, job) => sum + job.cores.length, 0), jobs = jobsOf(node);
  say($("node-title"), node.id);
  say($("node-facts"), [WORDS[node.state] || node.state, node.rack ? `rack ${node.rack}` : "", useWords(node), heatWords(heat.get(node.id)), whyOf(node)].filter(Boolean).join(" · "));
  $("node-jobs").replaceChildren(...jobs.map((job) => el("li", {}, el("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, `${look(job.id).label} · ${job.name || job.id}`),
    el("span", { class: "muted" }, ` · ${job.gpus.length ? `${plural(job.gpus.length, "GPU")}, ` : ""}${plural(job.cores.length, "core")}`))),
  ...(jobs.length ? [] : [el("li", { class: "muted" }, "No job of yours is here.")]),
  ...(!past && node.cores_used > known ? [el("li", { class: "muted" }, `${plural(node.cores_used - known, "core")} of jobs that are not yours to see`)] : []));
  $("node").showModal();
}

// Above the nodes -----------------------------------------------------------------------------------------------------

let legendKey = "";
function legend() {
  $("scale").hidden = $("legend").hidden = false;
  const jobs = new Map();
  for (const node of sorted) { for (const job of jobsOf(node)) jobs.set(job.id, job); if (jobs.size > LEGEND_MAX && legendKey) break; }
  const first = [...jobs.values()].slice(0, LEGEND_MAX), key = JSON.stringify([first.map((job) => [job.id, job.name]), jobs.size > LEGEND_MAX]);
  if (key === legendKey) return;
  legendKey = key;
  const items = first.map((job) => {
    const canvas = el("canvas", { "aria-hidden": true }), ratio = devicePixelRatio || 1, is = look(job.id);
    canvas.width = canvas.height = 18 * ratio;
    canvas.style.width = canvas.style.height = "18px";
    const one = canvas.getContext("2d");
    one.scale(ratio, ratio);
    cell(one, 0, 0, 18, 18, is, is.label);
    return el("li", {}, el("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, canvas, el("span", { class: "label" }, job.name || job.id)));
  });
  if (jobs.size > LEGEND_MAX) items.push(el("li", { class: "muted" }, "and more"));
  $("legend").replaceChildren(...items);
}

function showScale() {
  $("scale").replaceChildren(el("span", { class: "muted" }, `${MODES[mode][0].toUpperCase()}${MODES[mode].slice(1)}: 0`),
    ...scale().map((colour) => { const one = el("span", { class: "step" }); one.style.background = colour; return one; }), el("span", { class: "muted" }, "100 %"));
}

function verdict() {
  const off = sorted.filter((node) => node.state !== "ready").length;
  const ill = sorted.reduce((sum, node) => sum + node.numa.reduce((more, part) => more + part.gpus.filter((gpu) => gpu.ill).length, 0), 0);
  gap($("heat-gap"), mode === "held" ? null : heatState, "Samples are");
  if (capacity?.trouble) { say($("verdict"), "Nodes are unknown"); say($("capacity"), capacity.trouble); return; }
  if (capacity) say($("capacity"), `${capacity.gpus_used.toLocaleString("en")} of ${plural(capacity.gpus, "GPU")} and ${capacity.cores_used.toLocaleString("en")} of ${plural(capacity.cores, "core")} in use`);
  if (sorted.length) say($("verdict"), off || ill ? `${sorted.length - off} of ${plural(sorted.length, "node")} take work${ill ? `, ${plural(ill, "ill GPU")}` : ""}` : sorted.length === 1 ? "The node takes work" : `All ${sorted.length.toLocaleString("en")} nodes take work`);
  const empty = $("empty"), nothing = !sorted.length && capacity?.nodes === 0;
  empty.hidden = !nothing;
  $("map-card").hidden = !sorted.length;
  if (nothing && !empty.firstChild) empty.append(el("h2", {}, "No node has joined yet"), el("p", { class: "muted" }, "Start an agent on each machine:"), copyLine("cotenant serve agent --endpoints placement=HOST:7071"));
}

// Time ----------------------------------------------------------------------------------------------------------------

/** Return which jobs on the screen will probably have ended, and say of how many that is not known. */
function foretell() {
  if (minutes <= 0) { ending.clear(); return; }
  const jobs = new Map(shown.flatMap((node) => node.jobs).map((job) => [job.id, job])), ends = new Set();
  forecasts.want([...jobs.keys()]);
  let unknown = 0;
  for (const id of jobs.keys()) {
    const eta = forecasts.known.has(id) ? expected("running", forecasts.known.get(id)) : null;
    if (!eta) unknown++;
    else if (eta.median <= 60 * minutes) ends.add(id);
  }
  if ([...ends].sort().join() !== [...ending].sort().join()) { ending = ends; redrawAll(); }
  say($("when-words"), `Of ${plural(jobs.size, "job")} on the screen, ${ends.size} will probably have ended${unknown ? `; of ${unknown} the end is not predicted` : ""}. What starts then is not foretold.`);
}

let asked = 0;
async function travel() {
  minutes = Number($("when").value);
  const number = ++asked;
  say($("when-out"), minutes ? `${minutes > 0 ? "in " : ""}${duration(60 * Math.abs(minutes))}${minutes < 0 ? " ago" : ""}` : "now");
  $("when").setAttribute("aria-valuetext", $("when-out").textContent);
  $("when-now").hidden = !minutes;
  if (minutes >= 0) { past = null; ending = new Set(); say($("when-words"), ""); redrawAll(); return; }
  try {
    const response = await fetch(`/api/cluster?at=${Math.round(now() + 60 * minutes)}`), answer = await response.json();
    if (number !== asked) return;
    if (!response.ok) throw new Error(answer.error);
    past = answer.nodes;
    ending = new Set();
    const jobs = new Set(Object.values(past).flat().map((job) => job.id));
    say($("when-words"), `${plural(jobs.size, "job")} held resources then, at ${new Date(1000 * answer.at).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })}. Nodes and their states are those of now.`);
  } catch (error) { if (number === asked) say($("when-words"), error.message || "The dashboard does not answer."); return; }
  redrawAll();
}
let travelling = 0;
$("when").min = -DAY_MINUTES;
$("when").addEventListener("input", () => { travelling ||= setTimeout(() => { travelling = 0; travel(); }, 120); });
$("when-now").addEventListener("click", () => { $("when").value = 0; travel(); $("when").focus(); });
$("node-close").addEventListener("click", () => $("node").close());

for (const button of $("modes").querySelectorAll("button")) {
  button.addEventListener("click", () => {
    mode = button.dataset.mode;
    for (const one of $("modes").querySelectorAll("button")) one.setAttribute("aria-pressed", one === button);
    showScale();
    redrawAll();
  });
}
showScale();
onKey("n", () => { $("when").value = 0; travel(); });

const restyle = () => { newTheme(); legendKey = ""; showScale(); redrawAll(); };
addEventListener("themechange", restyle);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
let sizing = 0;
addEventListener("resize", () => { clearTimeout(sizing); sizing = setTimeout(redrawAll, 100); });

follow("/events/cluster", {
  nodes(batch) {
    if (batch.whole) { nodes.clear(); unsorted = true; }
    for (const node of batch.rows) { if (!nodes.has(node.id) || differs(nodes.get(node.id), node)) unsorted = true; nodes.set(node.id, node); dirty.add(node.id); }
    for (const id of batch.removed) { nodes.delete(id); unsorted = true; }
    if (!batch.more) later();
  },
  board(batch) {
    for (const row of batch.rows) { if (row.id === "state") heatState = row; else { heat.set(row.node, row); dirty.add(row.node); } }
    for (const id of batch.removed) { heat.delete(id.slice(5)); dirty.add(id.slice(5)); }
    later();
  },
}, { onMeta(row) { if (row.id === "capacity") { capacity = row; later(); } } });

/** Return whether a node's card has another height than before. */
function differs(before, node) { return Boolean(whyOf(before)) !== Boolean(whyOf(node)) || JSON.stringify(before.numa.map((part) => [part.cores.length, part.gpus.length])) !== JSON.stringify(node.numa.map((part) => [part.cores.length, part.gpus.length])); }
