// The queue: who is next, why, and who holds up whom.
import { $, bar, copyLine, duration, el, expected, follow, gap, jobLink, now, percent, plural, say, short } from "./page.js";
import { answers, virtualRows } from "./rows.js";

const DATES_BEGIN = 1e9, DATES_END = 1e10; // of scores that are moments
const ALL_MAX = 60, NAMED_MAX = 8; // up to so many waiting jobs are all asked for
const jobs = new Map(), board = new Map();
const places = answers("/api/places", () => later());
let waiting = [], synced = false, pending = 0;
const list = $("list"), rows = virtualRows({ list, scroller: $("scroller"), makeRow, fill, drawn: wantPlaces });

const placeOf = (job) => places.known.get(job.id);
const later = () => { pending ||= requestAnimationFrame(arrange); };

/** The order as far as it is known; then by priority and age, which is only where to ask next. */
function compare(a, b) {
  const [x, y] = [placeOf(a)?.position || Infinity, placeOf(b)?.position || Infinity];
  if (x !== y) return x < y ? -1 : 1;
  return (b.priority || 0) - (a.priority || 0) || (a.made || 0) - (b.made || 0) || (a.id < b.id ? -1 : 1);
}

function arrange() {
  pending = 0;
  waiting = [...jobs.values()].filter((job) => job.phase === "queued").sort(compare);
  for (const id of places.known.keys()) if (jobs.get(id)?.phase !== "queued") places.known.delete(id);
  list.hidden = !waiting.length;
  showVerdict();
  showEmpty();
  rows.set(waiting);
  showRules();
  showHolders();
  showFree();
}

function wantPlaces() {
  const asked = waiting.length <= ALL_MAX ? waiting : rows.visible();
  const named = asked.flatMap((job) => placeOf(job)?.ahead || []).map((one) => one.id).filter((id) => id && jobs.has(id) && !places.known.has(id));
  places.want([...new Set([...asked.map((job) => job.id), ...named])]);
}

// In words ------------------------------------------------------------------------------------------------------------

function showVerdict() {
  const queue = board.get("queues")?.rows[0], hidden = (queue?.waiting || 0) - waiting.length;
  if (!synced && !waiting.length) return;
  const starts = waiting.map((job) => [job, expected("queued", placeOf(job))]).filter(([, eta]) => eta?.verb === "starts").sort((a, b) => a[1].median - b[1].median)[0];
  const next = starts ? `; ${starts[0].name || starts[0].id} starts next, in about ${duration(starts[1].median)}` : "";
  say($("verdict"), waiting.length ? `${plural(waiting.length, "job")} ${waiting.length === 1 ? "waits" : "wait"}${next}` : "Nothing waits");
  document.title = `${waiting.length} waiting · Cotenant`;
  const known = waiting.filter((job) => placeOf(job)?.position).length, parts = [];
  if (queue) parts.push(`Ordered by ${queue.policy}.`);
  if (waiting.length > ALL_MAX && known < waiting.length) parts.push(`The places of ${known.toLocaleString("en")} are known; those on the screen are asked for.`);
  if (hidden > 0 && synced) parts.push(`${plural(hidden, "job")} of other tenants ${hidden === 1 ? "waits" : "wait"} too.`);
  say($("order"), parts.join(" "));
}

function showEmpty() {
  const nothing = synced && !waiting.length;
  $("empty").hidden = !nothing;
  if (nothing && !$("empty").firstChild) {
    $("empty").append(el("h2", {}, "No job waits"), el("p", { class: "muted" }, "Jobs that find no room appear here in their order. Ask when one would start, without submitting it:"),
      copyLine("cotenant whatif --gpus 8 -- python3 train.py"));
  }
}

function showRules() {
  const part = board.get("queues"), queue = part?.rows[0];
  gap($("rules-gap"), part, "The rules are");
  if (!queue) return;
  const rules = queue.rules, after = Number(rules.reserve_after_seconds), half = Number(rules.usage_half_life_seconds), least = Number(rules.run_seconds_min);
  const options = Object.entries(queue.options).map(([name, value]) => `${name}=${value}`).join(", ");
  const reserved = waiting.filter((job) => job.reserved);
  const facts = [
    ["Policy", queue.policy], ["Its options", options], ["Running", queue.running.toLocaleString("en")],
    ["Between tenants", rules.fair_share === "tenants" ? "fair share by weight, then the policy" : "the policy alone"],
    ["Past use", half ? `counts half after ${duration(half)}` : "does not count"],
    ["Preemption", { policy: "as the policy says", priority: "for higher priorities", never: "never" }[rules.preemption] || rules.preemption],
    ["A run is safe for", least ? duration(least) : ""],
    ["Reservations", Number.isFinite(after) ? `after ${duration(after)} of waiting, at most ${rules.reservations}` : "none"],
  ].filter(([, value]) => value);
  const key = JSON.stringify([facts, reserved.map((job) => [job.id, job.name, job.reserved])]);
  if ($("rules").dataset.key === key) return;
  $("rules").dataset.key = key;
  $("rules").replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
    ...(reserved.length ? [el("dt", {}, "Reserved for"), el("dd", {}, ...reserved.slice(0, NAMED_MAX).map((job) => el("div", {}, jobLink(job.id, job.name), ` on ${plural(job.reserved, "node")}`)))] : []));
}

function showHolders() {
  const held = new Map();
  for (const job of waiting) {
    for (const one of placeOf(job)?.ending || []) {
      const known = held.get(one.id) || { ...one, jobs: [] };
      known.jobs.push(job);
      held.set(one.id, known);
    }
  }
  const found = [...held.values()].sort((a, b) => b.jobs.length - a.jobs.length || (a.id < b.id ? -1 : 1)).slice(0, NAMED_MAX);
  $("holders-card").hidden = !found.length;
  const key = JSON.stringify(found.map((one) => [one.id, one.name, one.jobs.map((job) => job.id)]));
  if ($("holders").dataset.key === key) return;
  $("holders").dataset.key = key;
  $("holders").replaceChildren(...found.map((one) => el("li", {}, jobLink(one.id, one.name), el("span", { class: "muted" }, " must end before "),
    one.jobs.length === 1 ? jobLink(one.jobs[0].id, one.jobs[0].name) : plural(one.jobs.length, "job"), el("span", { class: "muted" }, one.jobs.length === 1 ? " starts" : " start"))));
}

function showFree() {
  const part = board.get("free"), free = part?.rows[0];
  gap($("free-gap"), part, "The nodes are");
  if (!free) return;
  const apart = waiting.filter((job) => job.wait === "fragmentation").length;
  const lines = [];
  if (free.gpus) lines.push(`${free.gpus_free} of ${plural(free.gpus, "GPU")} free; most on one node: ${free.gpus_free_most}.`);
  lines.push(`${free.cores_free} of ${plural(free.cores, "core")} free; most on one node: ${free.cores_free_most}.`);
  if (free.nodes_ready < free.nodes) lines.push(`${plural(free.nodes - free.nodes_ready, "node")} of ${free.nodes} ${free.nodes - free.nodes_ready === 1 ? "takes" : "take"} no work.`);
  lines.push(apart ? `${plural(apart, "job")} ${apart === 1 ? "waits" : "wait"} because what is free is fragmented.` : "No job waits because of fragmentation.");
  if ($("free").dataset.key !== lines.join()) { $("free").dataset.key = lines.join(); $("free").replaceChildren(...lines.map((line) => el("li", {}, line))); }
  const counts = free.gpus ? free.nodes_by_free_gpus : [], key = JSON.stringify(counts);
  $("pieces-table").hidden = !counts.length;
  if ($("pieces").dataset.key === key) return;
  $("pieces").dataset.key = key;
  $("pieces").replaceChildren(...counts.slice(0, 9).map(([gpus, nodes]) => el("tr", {}, el("td", { class: "number" }, String(gpus)), el("td", { class: "number" }, String(nodes)), el("td", { class: "wide" }, bar(nodes / free.nodes_ready)))));
}

function showShares() {
  const part = board.get("shares");
  gap($("shares-gap"), part, "The shares are");
  const found = [...(part?.rows || [])].sort((a, b) => b.share - a.share || b.usage_share - a.usage_share).slice(0, 50);
  $("shares-table").hidden = !found.length;
  $("shares").replaceChildren(...found.map((one) => el("tr", {}, el("th", { scope: "row" }, el("a", { href: `/tenants/${encodeURIComponent(one.tenant)}` }, one.tenant)),
    el("td", { class: "number" }, percent(one.share)), el("td", { class: "number" }, percent(one.fair_share)), el("td", { class: "number" }, one.half_life_seconds ? percent(one.usage_share) : "–"),
    el("td", { class: "wide" }, bar(one.share, one.fair_share)))));
}

// Rows ----------------------------------------------------------------------------------------------------------------

function makeRow() {
  const cell = (name, ...children) => el("span", { role: "cell", class: name }, ...children);
  const link = el("a", {}), id = el("code", { class: "id" });
  const placeButton = el("button", { type: "button", class: "place" });
  const cells = { place: cell("q-place number", placeButton), score: cell("q-score"), tenant: cell("c-tenant"), needs: cell("q-needs"), why: cell("c-why"), by: cell("q-by"), eta: cell("c-eta"), age: cell("c-age number") };
  const { place, ...rest } = cells;
  const row = { ...cells, placeButton, link, id, root: el("div", { role: "row", class: "row" }, place, cell("c-name", link, id), ...Object.values(rest)) };
  placeButton.addEventListener("click", () => { const job = jobs.get(link.dataset.row); if (job) explain(job); });
  return row;
}

const amount = (value) => (Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(3)).toString());

/** Show what the order made of a job: its level, score and votes, its tenant's share, who goes before it and when it starts. */
function explain(job) {
  const place = placeOf(job) || {}, share = board.get("shares")?.rows.find((one) => one.tenant === job.tenant), queue = board.get("queues")?.rows[0];
  const ahead = place.ahead || [], ending = place.ending || [], delayed = waiting.filter((one) => (placeOf(one)?.ahead || []).some((other) => other.id === job.id));
  const list = (found, count) => [...found.slice(0, NAMED_MAX).map((one) => el("div", {}, jobLink(one.id, one.name), one.needs ? el("span", { class: "muted" }, ` · ${one.needs}`) : "")), count > found.length ? el("div", { class: "muted" }, `and ${count - found.length} more`) : ""];
  const facts = [
    ["Priority", String(job.priority || 0)],
    [`Level by ${place.queue_policy || queue?.policy || "the policy"}`, place.position ? String(place.level) : ""],
    ["Score; lower runs first", place.position ? score(job, place) : ""],
    ...Object.entries(place.votes || {}).map(([name, value]) => [name[0].toUpperCase() + name.slice(1), amount(value)]),
    ["Its tenant's share", share ? `${percent(share.share)} held, ${percent(share.fair_share)} fair${share.half_life_seconds ? `, ${percent(share.usage_share)} of past use` : ""}` : ""],
    ["Between tenants", queue ? (queue.rules.fair_share === "tenants" ? "fair share by weight, before the policy" : "the policy alone") : ""],
    ["Starts", place.outlook || ""],
    ["Must end first", ending.length ? list(ending, place.forecast?.ending_count || ending.length) : ""],
    ["Ahead of it", ahead.length ? list(ahead, place.ahead_count || ahead.length) : ""],
    ["It delays, of those on the screen", delayed.length ? list(delayed, delayed.length) : ""],
  ].filter(([, value]) => value);
  say($("why-title"), place.position ? `Why ${job.name || job.id} has place ${place.position} of ${place.waiting}` : `Why ${job.name || job.id} has no place`);
  say($("why-words"), job.why || "");
  $("why-facts").replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, ...(Array.isArray(value) ? value : [value]))]));
  $("why").showModal();
}
$("why-close").addEventListener("click", () => $("why").close());

/** Return a score as its policy means it: some order by moments, which are unix times. */
function score(job, place) {
  const at = place.score, moment = new Date(1000 * at);
  if (at < DATES_BEGIN || at > DATES_END) return String(Number(at.toPrecision(10)));
  const time = now() - at < 86400 && at - now() < 86400 ? moment.toLocaleTimeString("en-GB") : moment.toLocaleDateString("en-CA");
  return `${Math.abs(at - job.made) < 1 ? "submitted" : at > now() ? "by" : "since"} ${time}`;
}

function heldUpBy(place) {
  const by = place.ending?.length ? place.ending : place.ahead || [], count = place.ending?.length ? place.forecast?.ending_count || by.length : place.ahead_count || by.length;
  if (!by.length) return [];
  return [place.ending?.length ? "the end of " : "", jobLink(by[0].id, by[0].name), count > 1 ? ` and ${count - 1} more` : ""];
}

function fill(row, job, changed) {
  const place = placeOf(job) || {};
  if (changed) {
    row.link.href = `/jobs/${encodeURIComponent(job.id)}`;
    say(row.link, job.name || job.id);
    say(row.id, job.name ? job.id : "");
    say(row.tenant, job.tenant || "–");
    say(row.needs, [job.gpus ? plural(job.gpus, "GPU") : "", job.cores ? plural(job.cores, "core") : "cores: auto"].filter(Boolean).join(", "));
    say(row.why, job.why || "");
    row.why.title = job.why || "";
  }
  say(row.placeButton, place.position ? String(place.position) : place.read_at ? "–" : "…");
  row.placeButton.setAttribute("aria-label", `Why ${job.name || job.id} has ${place.position ? `place ${place.position}` : "no place"}`);
  row.place.title = place.position ? "" : place.read_at ? "It is not in the order now: it waits for something else." : "asked for";
  say(row.score, place.position ? `${place.level ? `${place.level}: ` : ""}${score(job, place)}` : "");
  row.score.title = place.position ? `Level ${place.level}, score ${place.score} by ${place.queue_policy}; lower runs first.` : "";
  const by = heldUpBy(place), key = JSON.stringify([place.ending, place.ahead, place.ahead_count]);
  if (row.by.dataset.key !== key) { row.by.dataset.key = key; row.by.replaceChildren(...by); }
  say(row.eta, (expected("queued", place)?.words || "").replace("starts ", ""));
  row.eta.title = place.outlook || "";
  say(row.age, short(now() - (job.made || now())));
}

// Changes -------------------------------------------------------------------------------------------------------------

follow("/events/queue", {
  jobs(batch) {
    if (batch.whole) jobs.clear();
    for (const job of batch.rows) jobs.set(job.id, job);
    for (const id of batch.removed) jobs.delete(id);
    if (!batch.more) later();
  },
  board(batch) {
    for (const row of batch.rows) board.set(row.id, row);
    showShares();
    later();
  },
}, { onMeta(row) { if (row.id === "watch") { synced = row.synced; later(); } } });
