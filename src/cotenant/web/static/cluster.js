// The cluster: each node as cores and GPUs by NUMA node, coloured by job.
import { $, copyLine, el, follow, plural, say } from "./page.js";

// Okabe and Ito's colours, which all readers tell apart; then the same with patterns. A label says which it is, too.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7d7d7d"];
const DARK_TEXT = new Set(["#e69f00", "#56b4e9", "#f0e442", "#cc79a7", "#009e73"]);
const PATTERNS = 4, LEGEND_MAX = 40, CELL = 14, GPU = 30, GAP = 3;
const nodes = new Map(), cards = new Map(), looks = new Map();
const byName = new Intl.Collator("en", { numeric: true }).compare;
const order = [], styles = new Map(); // ids as they stand on the page; colours of the theme
let capacity = null, pending = 0, cardWidth = 0; // asked of the browser once: each question costs a layout, and there are thousands

function css(name) {
  if (!styles.has(name)) styles.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return styles.get(name);
}

/** Return the colour, pattern and label of a job; they stay as long as the page does. */
function look(id) {
  if (!looks.has(id)) {
    const number = looks.size, letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
    const label = number < 26 ? letters[number] : letters[Math.floor(number / 26 - 1) % 26] + letters[number % 26];
    looks.set(id, { colour: COLOURS[number % COLOURS.length], pattern: Math.floor(number / COLOURS.length) % PATTERNS, label });
  }
  return looks.get(id);
}

function cell(ctx, x, y, width, height, is) {
  ctx.beginPath();
  ctx.roundRect(x, y, width, height, 2.5);
  if (!is) { ctx.fillStyle = css("--raised"); ctx.fill(); ctx.strokeStyle = css("--line"); ctx.lineWidth = 1; ctx.stroke(); return; }
  ctx.save();
  ctx.clip();
  ctx.fillStyle = is.colour;
  ctx.fillRect(x, y, width, height);
  ctx.strokeStyle = ctx.fillStyle = "rgb(0 0 0 / 45%)";
  ctx.lineWidth = 1.5;
  if (is.pattern === 1) for (let at = x - height; at < x + width; at += 5) { ctx.beginPath(); ctx.moveTo(at, y + height); ctx.lineTo(at + height, y); ctx.stroke(); }
  if (is.pattern === 2) for (let at = y + 2; at < y + height; at += 5) ctx.fillRect(x, at, width, 1.5);
  if (is.pattern === 3) for (let a = x + 3; a < x + width; a += 5) for (let b = y + 3; b < y + height; b += 5) ctx.fillRect(a - 1, b - 1, 2, 2);
  ctx.restore();
}

function mark(ctx, x, y, width, height, is, text) {
  ctx.font = `600 ${width > 20 ? 12 : 9}px system-ui`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.fillStyle = is ? (DARK_TEXT.has(is.colour) ? "#111" : "#fff") : css("--muted");
  ctx.fillText(text, x + width / 2, y + height / 2 + 0.5);
}

/** Draw a node: a box for each NUMA node with its GPUs above its cores. Return the height. */
function paint(canvas, node, width) {
  const cores = new Map(), gpus = new Map();
  for (const job of node.jobs) {
    for (const core of job.cores) cores.set(core, job.id);
    for (const [uuid, milli] of job.gpus) gpus.set(uuid, [...(gpus.get(uuid) || []), [job.id, milli]]);
  }
  const inner = width - 2, perRow = Math.max(1, Math.floor((inner + GAP) / (CELL + GAP))), gpusPerRow = Math.max(1, Math.floor((inner + GAP) / (GPU + GAP)));
  const heights = node.numa.map((part) => Math.ceil(part.gpus.length / gpusPerRow) * (GPU + GAP) + Math.ceil(part.cores.length / perRow) * (CELL + GAP));
  const height = heights.reduce((sum, one) => sum + one, 0) + 10 * Math.max(0, heights.length - 1) + 2;
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  let y = 1;
  node.numa.forEach((part, number) => {
    if (number) { ctx.fillStyle = css("--line"); ctx.fillRect(0, y + 2, width, 1); y += 10; }
    part.gpus.forEach((gpu, index) => {
      const x = 1 + (index % gpusPerRow) * (GPU + GAP), top = y + Math.floor(index / gpusPerRow) * (GPU + GAP);
      const shares = gpus.get(gpu.uuid) || [];
      cell(ctx, x, top, GPU, GPU, null);
      let from = 0;
      for (const [id, milli] of shares) { const part = (GPU * milli) / 1000; cell(ctx, x, top + GPU - from - part, GPU, part, look(id)); from += part; }
      const whole = shares.length === 1 && shares[0][1] >= 500 ? look(shares[0][0]) : null;
      if (gpu.ill) { ctx.strokeStyle = css("--red"); ctx.lineWidth = 2; ctx.strokeRect(x + 1, top + 1, GPU - 2, GPU - 2); mark(ctx, x, top, GPU, GPU, whole, "✕"); }
      else if (whole) mark(ctx, x, top, GPU, GPU, whole, whole.label);
    });
    y += Math.ceil(part.gpus.length / gpusPerRow) * (GPU + GAP);
    part.cores.forEach((core, index) => {
      const id = cores.get(core);
      cell(ctx, 1 + (index % perRow) * (CELL + GAP), y + Math.floor(index / perRow) * (CELL + GAP), CELL, CELL, id ? look(id) : null);
      if (id) mark(ctx, 1 + (index % perRow) * (CELL + GAP), y + Math.floor(index / perRow) * (CELL + GAP), CELL, CELL, look(id), look(id).label);
    });
    y += Math.ceil(part.cores.length / perRow) * (CELL + GAP);
  });
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const card = cards.get(entry.target.dataset.id);
    if (!card) continue;
    card.visible = entry.isIntersecting;
    if (card.visible && card.stale) draw(card);
  }
}, { rootMargin: "200px" });

function draw(card) {
  card.stale = false;
  cardWidth ||= Math.max(120, card.item.clientWidth - 24);
  paint(card.canvas, card.node, cardWidth);
}

const WORDS = { ready: "ready", cordoned: "cordoned", draining: "draining", away: "disconnected", lost: "lost" };

/** Return where an id stands, or would stand. */
function placeOf(id) {
  let low = 0, high = order.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (byName(order[middle], id) < 0) low = middle + 1; else high = middle;
  }
  return low;
}

function remove(id) {
  const at = placeOf(id);
  if (order[at] === id) order.splice(at, 1);
  nodes.delete(id);
  cards.get(id)?.item.remove();
  cards.delete(id);
}

/** Name the jobs of a node, once somebody asks. */
function showJobs({ details, jobs, node, known }) {
  if (!details.open) return;
  jobs.replaceChildren(...node.jobs.map((job) => el("li", {}, el("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, `${look(job.id).label} · ${job.name || job.id}`),
    el("span", { class: "muted" }, ` · ${job.gpus.length ? `${plural(job.gpus.length, "GPU")}, ` : ""}${plural(job.cores.length, "core")}`))),
  ...(node.cores_used > known ? [el("li", { class: "muted" }, `${plural(node.cores_used - known, "core")} of jobs that are not yours to see`)] : []));
}

function put(node) {
  let card = cards.get(node.id);
  if (!card) {
    const parts = { name: el("b", { title: node.id }, node.id), state: el("span", { class: "tag" }), use: el("p", { class: "muted" }), why: el("p", { class: "warning" }), canvas: el("canvas", { "aria-hidden": true }), jobs: el("ul", { class: "plain-list" }) };
    const details = el("details", {}, el("summary", {}, "Jobs here"), parts.jobs);
    const item = el("li", { class: "node", "data-id": node.id }, el("div", { class: "node-head" }, parts.name, parts.state), parts.use, parts.why, parts.canvas, details);
    card = { ...parts, item, details, visible: false, stale: true };
    cards.set(node.id, card);
    const at = placeOf(node.id);
    $("cluster-nodes").insertBefore(item, cards.get(order[at])?.item || null);
    order.splice(at, 0, node.id);
    details.addEventListener("toggle", () => showJobs(cards.get(node.id)));
    seen.observe(item);
  }
  card.node = node;
  card.item.dataset.state = node.state;
  const gpus = node.numa.reduce((sum, part) => sum + part.gpus.length, 0), cores = node.numa.reduce((sum, part) => sum + part.cores.length, 0);
  const ill = node.numa.flatMap((part) => part.gpus.filter((gpu) => gpu.ill));
  say(card.state, WORDS[node.state] || node.state);
  card.state.dataset.kind = node.state === "ready" ? "ok" : ["away", "lost"].includes(node.state) ? "bad" : "warn";
  say(card.use, `${gpus ? `${node.gpus_used} of ${plural(gpus, "GPU")}, ` : ""}${node.cores_used} of ${plural(cores, "core")} in use${node.numa.length > 1 ? ` · ${node.numa.length} NUMA nodes` : ""}`);
  say(card.why, [node.why, ...ill.map((gpu) => `GPU ${gpu.uuid.slice(0, 12)}: ${gpu.ill}`), ...node.problems.map((one) => one.reason)].filter(Boolean).join(" · "));
  card.why.hidden = !card.why.textContent;
  const known = node.jobs.reduce((sum, job) => sum + job.cores.length, 0);
  card.details.hidden = !node.jobs.length && node.cores_used <= known;
  card.known = known;
  showJobs(card);
  card.stale = true;
  if (card.visible) draw(card);
}

function legend() {
  pending = 0;
  const jobs = new Map();
  for (const node of nodes.values()) for (const job of node.jobs) jobs.set(job.id, job);
  const items = [...jobs.values()].slice(0, LEGEND_MAX).map((job) => {
    const canvas = el("canvas", { "aria-hidden": true }), ratio = devicePixelRatio || 1, is = look(job.id);
    canvas.width = canvas.height = 18 * ratio;
    canvas.style.width = canvas.style.height = "18px";
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    cell(ctx, 0, 0, 18, 18, is);
    mark(ctx, 0, 0, 18, 18, is, is.label);
    return el("li", {}, el("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, canvas, el("span", { class: "label" }, job.name || job.id)));
  });
  if (jobs.size > LEGEND_MAX) items.push(el("li", { class: "muted" }, `and ${plural(jobs.size - LEGEND_MAX, "more job")}`));
  $("legend").replaceChildren(...items);
  verdict();
}

function verdict() {
  const all = [...nodes.values()], off = all.filter((node) => node.state !== "ready");
  const ill = all.reduce((sum, node) => sum + node.numa.reduce((more, part) => more + part.gpus.filter((gpu) => gpu.ill).length, 0), 0);
  if (capacity?.trouble) { say($("verdict"), "Nodes are unknown"); say($("capacity"), capacity.trouble); return; }
  if (capacity) say($("capacity"), `${capacity.gpus_used} of ${plural(capacity.gpus, "GPU")} and ${capacity.cores_used} of ${plural(capacity.cores, "core")} in use`);
  if (all.length) say($("verdict"), off.length || ill ? `${all.length - off.length} of ${plural(all.length, "node")} take work${ill ? `, ${plural(ill, "ill GPU")}` : ""}` : all.length === 1 ? "The node takes work" : `All ${all.length} nodes take work`);
  const empty = $("empty"), nothing = !all.length && capacity?.nodes === 0;
  empty.hidden = !nothing;
  if (nothing && !empty.firstChild) empty.append(el("h2", {}, "No node has joined yet"), el("p", { class: "muted" }, "Start an agent on each machine:"), copyLine("cotenant serve agent --endpoints placement=HOST:7071"));
}

const later = () => { pending ||= requestAnimationFrame(legend); };
const redraw = () => { styles.clear(); cardWidth = 0; for (const card of cards.values()) { card.stale = true; if (card.visible) draw(card); } later(); };
addEventListener("themechange", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let sizing = 0;
addEventListener("resize", () => { clearTimeout(sizing); sizing = setTimeout(redraw, 100); });

follow("/events/cluster", {
  nodes(batch) {
    const named = new Set(batch.rows.map((node) => node.id));
    const gone = batch.whole && !batch.more ? [...nodes.keys()].filter((id) => !named.has(id)) : batch.removed;
    gone.forEach(remove);
    for (const node of batch.rows) { nodes.set(node.id, node); put(node); }
    later();
  },
}, { onMeta(row) { if (row.id === "capacity") { capacity = row; later(); } } });
