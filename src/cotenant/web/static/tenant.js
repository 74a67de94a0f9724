// One tenant: its quota and what is borrowed and lent of it, its share, and what its users used.
import { $, bar, duration, el, follow, gap, percent, plural, say } from "./page.js";
import { hours, showUsage } from "./usage.js";

const id = $("tenant").dataset.id, board = new Map();
const written = (value) => (value === null || value === undefined ? "–" : Number(value.toFixed(3)).toLocaleString("en"));

function arrange() {
  const part = board.get("tenants"), one = part?.rows.find((row) => row.id === id), share = board.get("shares")?.rows.find((row) => row.tenant === id);
  gap($("tenants-gap"), part, "The tenant is");
  gap($("shares-gap"), board.get("shares"), "Its share is");
  gap($("free-gap"), board.get("free"), "What is lent is");
  if (one) showQuota(one);
  if (share) showShare(share);
}

function showQuota(one) {
  say($("verdict"), sentence(one));
  const free = board.get("free")?.rows[0], parts = [["GPUs", "gpus", one.limit_gpus || free?.gpus], ["Cores", "cores", one.limit_cores || free?.cores]];
  const row = (name, cells) => el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((cell) => el("td", { class: "number" }, cell)));
  const fields = [["Holds", (what) => `${what}_used`], ["Quota", (what) => `quota_${what}`], ["Limit", (what) => `limit_${what}`], ["Borrowed", (what) => `${what}_borrowed`], ["Idle", (what) => `${what}_idle`], ["Lent, at least", (what) => `${what}_lent_min`]];
  $("quota").replaceChildren(el("thead", {}, el("tr", {}, el("td", {}), ...parts.map(([name]) => el("th", { scope: "col", class: "number" }, name)))),
    el("tbody", {}, ...fields.map(([name, field]) => row(name, parts.map(([, what]) => written(one[field(what)])))),
      row("Held; the mark is the quota", parts.map(([, what, most]) => (most ? bar(one[`${what}_used`] / most, one[`quota_${what}`] === null ? null : one[`quota_${what}`] / most) : "–")))));
  const facts = [["Weight", String(one.weight)], ["Parent", one.parent], ["In the store", `${(one.bytes_used / 2 ** 20).toFixed(1)} MiB${one.bytes_allowed ? ` of ${(one.bytes_allowed / 2 ** 20).toFixed(0)} MiB` : ""}`]].filter(([, value]) => value);
  $("facts").replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, name === "Parent" ? el("a", { href: `/tenants/${encodeURIComponent(value)}` }, value) : value)]));
}

function sentence(one) {
  if (one.quota_gpus === null) return `Holds ${plural(one.gpus_used, "GPU")} and ${plural(one.cores_used, "core")}, without a quota of GPUs.`;
  if (one.gpus_borrowed) return `Holds ${plural(one.gpus_used, "GPU")}: its quota of ${written(one.quota_gpus)}, and ${written(one.gpus_borrowed)} borrowed.`;
  const idle = Number((one.quota_gpus - one.gpus_used).toFixed(3));
  return `Holds ${written(one.gpus_used)} of its quota of ${plural(one.quota_gpus, "GPU")}${idle ? `; ${written(idle)} idle${one.gpus_lent_min ? `, of which others hold at least ${written(one.gpus_lent_min)}` : ""}` : ""}.`;
}

function showShare(one) {
  const row = (name, share, mark) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "number" }, percent(share)), el("td", { class: "wide" }, bar(share, mark)));
  $("share").replaceChildren(el("tbody", {}, row("Holds of the cluster", one.share, one.fair_share), row("Fair share", one.fair_share), ...(one.half_life_seconds ? [row("Of the past use", one.usage_share, one.fair_share)] : [])));
  say($("share-words"), one.half_life_seconds ? `Past use counts half after ${duration(one.half_life_seconds)}: ${hours(one.gpu_hours)} GPU-hours and ${hours(one.core_hours)} core-hours are left of it. The mark is the fair share.` : "Past use does not count. The mark is the fair share.");
}

showUsage(id, () => {});
follow("/events/tenants", { board(batch) { for (const row of batch.rows) board.set(row.id, row); arrange(); } });
