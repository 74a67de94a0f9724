// Incidents of contention: who slowed whom, what was done, and how far that helped, on one time axis.
import { $, copyLine, duration, el, follow, jobLink, now, percent, plural, say } from "./page.js";
import { virtualRows } from "./rows.js";

const SPANS = [[3600, "1 h"], [6 * 3600, "6 h"], [86400, "24 h"], [0, "All"]];
const jobs = new Map(), incidents = new Map(), nodes = new Map();
const list = $("list"), rows = virtualRows({ list, scroller: $("scroller"), makeRow, fill });
let state = null, span = 0, chosen = "", axis = [0, 1], pending = 0;
const later = () => { pending ||= requestAnimationFrame(arrange); };
const nameOf = (id) => (id ? jobs.get(id)?.name || id : "unknown");
const clock = (time) => new Date(1000 * time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const stamp = (time, long) => (long ? new Date(1000 * time).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" }) : clock(time));
const endOf = (one) => one.end ?? now();

function arrange() {
  pending = 0;
  if (!state) return;
  const all = [...incidents.values()].sort((a, b) => b.start - a.start || (a.id < b.id ? -1 : 1));
  const found = all.filter((one) => !span || endOf(one) > now() - span);
  const from = span ? now() - span : Math.min(...found.map((one) => one.start), now() - 60);
  axis = [from, now()];
  list.hidden = !found.length;
  say($("axis-from"), stamp(axis[0], axis[1] - axis[0] > 43200));
  say($("axis-to"), "now");
  showHead(all, found);
  rows.set(found);
  showDetail();
}

function showHead(all, found) {
  const open = all.filter((one) => one.end === null), worst = [...open].sort((a, b) => b.slowdown - a.slowdown)[0];
  $("gap").hidden = !state.trouble;
  if (state.trouble) say($("gap"), state.trouble.startsWith("your API token") ? "Incidents name jobs of several tenants: your API token may not see them." : `Incidents are missing: ${state.trouble}`);
  say($("verdict"), state.trouble ? "Incidents are unknown" : worst ? `${worst.victim ? `${nameOf(worst.victim)} is slowed by ${percent(worst.slowdown)}, probably by ` : "Held back now: "}${nameOf(worst.suspect)}${open.length > 1 ? `; ${open.length} incidents are open` : ""}` : "No contention now");
  const held = found.filter((one) => one.recovered), mean = held.reduce((sum, one) => sum + one.recovered, 0) / held.length;
  say($("words"), all.length ? `${plural(found.length, "incident")} shown${found.length < all.length ? ` of ${all.length}` : ""}${held.length ? `; victims came back to ${percent(mean)} of their baseline on average` : ""}.${state.policy ? ` ${state.policy} acts.` : ""}` : "");
  $("spans").hidden = !all.length;
  if (!$("spans").children.length) $("spans").append(...SPANS.map(([length, name]) => el("button", { type: "button", "data-span": length, onclick: () => { span = length; later(); } }, name)));
  for (const button of $("spans").children) button.setAttribute("aria-pressed", Number(button.dataset.span) === span);
  showEmpty(all, found);
}

function showEmpty(all, found) {
  const key = state.trouble || found.length ? "" : all.length ? "elsewhen" : `none ${state.policy}`;
  $("empty").hidden = !key;
  if (!key || $("empty").dataset.key === key) return;
  $("empty").dataset.key = key;
  if (all.length) $("empty").replaceChildren(el("h2", {}, "No incident in that time"), el("p", {}, el("button", { type: "button", onclick: () => { span = 0; later(); } }, "Show all incidents")));
  else if (state.policy) $("empty").replaceChildren(el("h2", {}, "No incident yet"), el("p", { class: "muted" }, `${state.policy} watches the nodes. The last 1,000 incidents since the contention service started appear here.`));
  else $("empty").replaceChildren(el("h2", {}, "No contention policy acts"), el("p", { class: "muted" }, "With one, jobs that slow others down are found and held back:"), copyLine("cotenant up --contention coda-eliminator"));
}

// Rows ----------------------------------------------------------------------------------------------------------------

/** Draw an incident on an axis: a bar from its start to its end, and a tick for each action. */
function lane(element, one, [from, to]) {
  const at = (time) => `${(100 * Math.min(1, Math.max(0, (time - from) / (to - from))))}%`, span = el("span", { class: one.end === null ? "span open" : "span" });
  span.style.left = at(one.start);
  span.style.right = `calc(100% - ${at(endOf(one))})`;
  element.replaceChildren(span, ...one.actions.filter(([time]) => time !== null && time >= from).map(([time]) => { const tick = el("span", { class: "tick" }); tick.style.left = at(time); return tick; }));
}

function makeRow() {
  const cell = (name, ...children) => el("span", { role: "cell", class: name }, ...children);
  const link = el("a", {}), cells = { suspect: cell("i-suspect"), node: cell("i-node") }, strip = el("span", { class: "lane", "aria-hidden": true }), slowed = cell("number"), recovered = cell("number");
  link.addEventListener("click", (event) => { event.preventDefault(); choose(link.dataset.row); });
  return { ...cells, link, strip, slowed, recovered, root: el("div", { role: "row", class: "row" }, cell("c-name", link), cells.suspect, cells.node, cell("i-lane", strip), slowed, recovered) };
}

function fill(row, one) {
  row.link.href = `#${encodeURIComponent(one.id)}`;
  say(row.link, nameOf(one.victim));
  row.link.title = `${clock(one.start)}, ${one.end === null ? "open" : duration(one.end - one.start)}`;
  row.root.classList.toggle("chosen", one.id === chosen);
  say(row.suspect, nameOf(one.suspect));
  say(row.node, one.node);
  say(row.slowed, one.victim ? percent(one.slowdown) : "–");
  say(row.recovered, one.recovered ? percent(one.recovered) : one.end === null ? "open" : "–");
  lane(row.strip, one, axis);
}

// One incident --------------------------------------------------------------------------------------------------------

function choose(id) {
  chosen = id;
  history.replaceState(null, "", `#${encodeURIComponent(id)}`);
  later();
  requestAnimationFrame(() => requestAnimationFrame(() => $("detail").scrollIntoView({ block: "nearest" })));
}

function showDetail() {
  const one = incidents.get(chosen);
  $("detail").hidden = !one;
  if (!one) return;
  const lasted = endOf(one) - one.start;
  say($("detail-title"), `${nameOf(one.suspect)} on ${one.node}, ${stamp(one.start, true)}`);
  say($("detail-words"), `${one.victim ? `${nameOf(one.victim)} fell ${percent(one.slowdown)} below its baseline` : "No victim is named"}; ${one.end === null ? `open for ${duration(lasted)}` : `over after ${duration(lasted)}`}${one.recovered ? `, back at ${percent(one.recovered)}` : ""}.`);
  const strip = el("div", { class: "lane", "aria-hidden": true });
  lane(strip, one, [one.start, Math.max(endOf(one), one.start + 1)]);
  $("detail-lane").replaceChildren(strip, el("p", { class: "band-ends muted", "aria-hidden": true }, el("span", {}, clock(one.start)), el("span", {}, one.end === null ? "now" : clock(one.end))));
  const step = (time, name, text) => el("li", {}, time ? el("time", { title: new Date(1000 * time).toISOString() }, clock(time)) : "", el("b", {}, name), text ? el("p", {}, text) : "");
  const key = JSON.stringify([one.id, one.actions, one.outcome, nodes.get(one.node), jobs.get(one.victim)?.name, jobs.get(one.suspect)?.name]);
  if ($("detail").dataset.key === key) return;
  $("detail").dataset.key = key;
  $("detail-steps").replaceChildren(step(one.start, "Found", one.victim ? `${nameOf(one.victim)} runs ${percent(one.slowdown)} below its baseline.` : ""),
    ...one.actions.map(([time, text]) => step(time, "Action", text)), one.outcome ? step(one.end, "Outcome", one.outcome) : "");
  showFacts(one);
}

function showFacts(one) {
  const node = one.end === null ? nodes.get(one.node) : null, of = (id) => node?.attempts[id];
  const rate = (at) => (at?.rate ? `${at.rate.toPrecision(3)} steps/s${at.expected ? `, expected ${at.expected.toPrecision(3)}` : ""}` : "");
  const facts = [["Slowed job", one.victim ? jobLink(one.victim, nameOf(one.victim)) : ""], ["Suspect", jobLink(one.suspect, nameOf(one.suspect))],
    ["Its rate now", rate(of(one.victim))], ["The suspect uses now", of(one.suspect) ? `${of(one.suspect).cores_used.toFixed(1)} of ${plural(of(one.suspect).cores, "core")}` : ""],
    ["CPUs of the node stalled", node && node.cpu_stalled_percent !== null ? percent(node.cpu_stalled_percent / 100) : ""], ["Memory bandwidth in use", node && node.bandwidth_share !== null ? percent(node.bandwidth_share) : ""]].filter(([, value]) => value);
  $("detail-facts").replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

// Changes -------------------------------------------------------------------------------------------------------------

chosen = decodeURIComponent(location.hash.slice(1));
setInterval(() => { if (!document.hidden) later(); }, 2000);
follow("/events/incidents", {
  jobs(batch) {
    if (batch.whole) jobs.clear();
    for (const job of batch.rows) jobs.set(job.id, { name: job.name });
    for (const id of batch.removed) jobs.delete(id);
    if (!batch.more) later();
  },
  board(batch) {
    if (batch.whole) { incidents.clear(); nodes.clear(); }
    for (const id of batch.removed) { incidents.delete(id); nodes.delete(id.replace(/^node /, "")); }
    for (const row of batch.rows) {
      if (row.id === "state") state = row;
      else if (row.id.startsWith("node ")) nodes.set(row.node, row);
      else incidents.set(row.id, row);
    }
    later();
  },
});
