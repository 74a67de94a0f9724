// The tenants: what each may hold, holds and held.
import { $, bar, copyLine, duration, el, follow, gap, percent, plural, say } from "./page.js";
import { virtualRows } from "./rows.js";
import { hours, showUsage } from "./usage.js";

const board = new Map();
let used = new Map();
const list = $("list"), rows = virtualRows({ list, scroller: $("scroller"), makeRow, fill });
const written = (value) => (value === null || value === undefined ? "–" : Number(value.toFixed(3)).toLocaleString("en"));

/** The tenants as a tree: each behind its parent, by name. */
function ordered(tenants) {
  const known = new Map(tenants.map((one) => [one.id, one]));
  const path = (one, seen = new Set()) => {
    const parent = known.get(one.parent);
    return parent && !seen.has(one.id) ? [...path(parent, seen.add(one.id)), one.id] : [one.id];
  };
  const pathed = tenants.map((one) => ({ one, path: path(one) }));
  pathed.sort((a, b) => (a.path.join("\n") < b.path.join("\n") ? -1 : 1));
  return pathed.map(({ one, path }) => ({ ...one, depth: path.length - 1 }));
}

function arrange() {
  const part = board.get("tenants"), shares = new Map((board.get("shares")?.rows || []).map((one) => [one.tenant, one]));
  gap($("tenants-gap"), part, "Tenants are");
  gap($("shares-gap"), board.get("shares"), "The shares are");
  gap($("free-gap"), board.get("free"), "What is lent is");
  if (!part) return;
  const known = ordered(part.rows).map((one) => ({ ...one, of: shares.get(one.id), hours: used.get(one.id) }));
  list.hidden = !known.length;
  rows.set(known);
  const roots = known.filter((one) => !one.depth), held = sum(roots, "gpus_used"), borrowed = sum(roots, "gpus_borrowed");
  if (known.length) say($("verdict"), `${plural(known.length, "tenant")} ${known.length === 1 ? "holds" : "hold"} ${plural(held, "GPU")} and ${plural(sum(roots, "cores_used"), "core")}${borrowed ? `; ${plural(borrowed, "GPU")} beyond their quotas` : ""}`);
  const half = [...shares.values()].find((one) => one.half_life_seconds)?.half_life_seconds;
  say($("words"), `${half ? `Past use counts half after ${duration(half)}. ` : ""}${known.some((one) => one.quota_gpus !== null || one.quota_cores !== null) ? "" : "No tenant has a quota: nothing is guaranteed, borrowed or lent."}`);
  const alone = known.length === 1 && known[0].id === "default" && known[0].quota_gpus === null;
  $("empty").hidden = !alone;
  if (alone && !$("empty").firstChild) $("empty").append(el("h2", {}, "One tenant has everything"), el("p", { class: "muted" }, "An operator guarantees parts of the cluster to tenants:"), copyLine("cotenant tenants create vision --quota-gpus 8 --limit-gpus 16"));
}

const sum = (rows, name) => Number(rows.reduce((total, one) => total + (one[name] || 0), 0).toFixed(3));

function makeRow() {
  const cell = (name, ...children) => el("span", { role: "cell", class: name }, ...children), link = el("a", {});
  const cells = Object.fromEntries([["gpus", ""], ["quota", ""], ["limit", " t-more"], ["borrowed", " t-more"], ["lent", " t-more"], ["cores", " t-more"], ["share", ""], ["fair", " t-more"], ["past", " t-more"], ["hours", " t-more"]].map(([name, more]) => [name, cell(`number${more}`)]));
  const strip = cell("t-bar"), name = cell("c-name", link);
  return { ...cells, strip, name, link, root: el("div", { role: "row", class: "row" }, name, ...Object.values(cells), strip) };
}

function fill(row, one, changed) {
  if (!changed) return;
  row.link.href = `/tenants/${encodeURIComponent(one.id)}`;
  say(row.link, one.id);
  row.name.style.paddingLeft = `${16 * one.depth}px`;
  say(row.gpus, written(one.gpus_used));
  say(row.quota, written(one.quota_gpus));
  say(row.limit, written(one.limit_gpus));
  say(row.borrowed, written(one.gpus_borrowed));
  say(row.lent, written(one.gpus_lent_min));
  say(row.cores, written(one.cores_used));
  say(row.share, one.of ? percent(one.of.share) : "–");
  say(row.fair, one.of ? percent(one.of.fair_share) : "–");
  say(row.past, one.of?.half_life_seconds ? percent(one.of.usage_share) : "–");
  say(row.hours, one.hours === undefined ? "–" : hours(one.hours));
  row.strip.replaceChildren(one.of ? bar(one.of.share, one.of.fair_share) : "");
}

showUsage("", (found) => {
  used = new Map(found.tenants.rows.map((one) => [one.tenant, one.gpu_hours]));
  arrange();
});
follow("/events/tenants", { board(batch) { for (const row of batch.rows) board.set(row.id, row); arrange(); } });
