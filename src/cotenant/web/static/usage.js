// What was used in the last weeks, as tables: asked now and then, because the answer takes the mesh some work.
import { $, ask, bar, el, gap } from "./page.js";

const EVERY_SECONDS = 60, ROWS_MAX = 100;
export const hours = (value) => (value >= 100 ? Math.round(value) : Number(value.toPrecision(value >= 10 ? 3 : 2))).toLocaleString("en", { maximumFractionDigits: 4 });

/** Show the usage of a tenant, or of all that may be seen, again and again; tell `taken` of each answer. */
export function showUsage(tenant, taken) {
  async function read() {
    if (!document.hidden) {
      try {
        const found = await ask(`/api/usage${tenant ? `?tenant=${encodeURIComponent(tenant)}` : ""}`);
        show(found);
        taken(found);
      } catch (error) { gap($("usage-gap"), { trouble: error.message }, "What was used is"); }
    }
    setTimeout(read, 1000 * EVERY_SECONDS);
  }
  read();
}

function show(found) {
  const parts = [found.weeks, found.tenants, found.users];
  gap($("usage-gap"), parts.find((part) => part.trouble), "What was used is");
  table($("weeks-table"), ["Week from"], found.weeks.rows.map((one) => [[one.week], one]));
  const decayed = new Map(found.decayed.rows.map((one) => [one.user, one.gpu_hours]));
  const users = found.users.rows.map((one) => [[one.user || "unknown", ...(decayed.size ? [hours(decayed.get(one.user) || 0)] : [])], one]);
  table($("users-table"), ["User", ...(decayed.size ? ["Decayed"] : [])], users);
}

/** Show groups: named columns, then GPU-hours with a bar, core-hours and jobs. */
function table(element, names, rows) {
  const most = Math.max(...rows.map(([, one]) => one.gpu_hours), 0), of = most ? "gpu_hours" : "core_hours";
  const top = Math.max(...rows.map(([, one]) => one[of]), 1e-9), head = (text, index) => el("th", { scope: "col", class: index ? "number" : "" }, text);
  if (!rows.length) { element.replaceChildren(el("tbody", {}, el("tr", {}, el("td", {}, "No job ran in that time.")))); return; }
  element.replaceChildren(el("thead", {}, el("tr", {}, ...[...names, "GPU-hours", "Core-hours", "Jobs", "Failed"].map(head), el("td", { class: "wide" }))),
    el("tbody", {}, ...rows.slice(0, ROWS_MAX).map(([texts, one]) => el("tr", {}, ...texts.map((text, index) => el(index ? "td" : "th", index ? { class: "number" } : { scope: "row" }, text)),
      el("td", { class: "number" }, hours(one.gpu_hours)), el("td", { class: "number" }, hours(one.core_hours)), el("td", { class: "number" }, one.jobs.toLocaleString("en")), el("td", { class: "number" }, one.failed_jobs.toLocaleString("en")),
      el("td", { class: "wide" }, bar(one[of] / top))))),
    ...(rows.length > ROWS_MAX ? [el("tfoot", {}, el("tr", {}, el("td", { class: "muted" }, `and ${rows.length - ROWS_MAX} more: cotenant usage`)))] : []));
}
