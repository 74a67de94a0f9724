// What all pages share: elements, words for numbers, the stream of changes, the header, keys.

export const $ = (id) => document.getElementById(id);

/** Return an element. Texts are only ever set as text. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((one) => one !== null && one !== undefined && one !== ""));
  return made;
}

/** Set a text; an equal one is left alone, so that readers of the screen are not told again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const plural = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

/** Return a duration in the two largest units. */
export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return s < 600 && s % 60 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.round(s / 60)} min`;
  if (s < 86400) return Math.floor((s % 3600) / 60) ? `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min` : `${Math.floor(s / 3600)} h`;
  return Math.floor((s % 86400) / 3600) ? `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h` : `${Math.floor(s / 86400)} d`;
}

export const percent = (share) => `${Math.round(100 * share)}\u00a0%`;

/** Return a link to a job by its name; what another tenant has has neither. */
export function jobLink(id, name) {
  return id ? el("a", { href: `/jobs/${encodeURIComponent(id)}`, title: id }, name || id) : "another tenant's job";
}

/** Return a bar for a share from 0 to 1, with a mark at another one. The numbers stand beside it. */
export function bar(share, mark = null) {
  const clip = (value) => `${100 * Math.min(1, Math.max(0, value))}%`;
  const fill = el("span", { class: "fill-part" }), parts = [fill];
  fill.style.width = clip(share);
  if (mark !== null && mark !== undefined) { parts.push(el("span", { class: "mark" })); parts[1].style.left = clip(mark); }
  return el("div", { class: "bar", "aria-hidden": true }, ...parts);
}

/** Show a part of a board: what is there, or why it is missing. */
export function gap(element, part, name) {
  element.hidden = !part?.trouble;
  if (part?.trouble) say(element, `${name} missing: ${part.trouble}`);
}

/** Return a duration in its largest unit, for columns. */
export function short(seconds) {
  const s = Math.max(0, seconds);
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}

// By the clock of the server: a browser's may be off. Small differences are the time that the page took to come.
const off = Number(document.querySelector("meta[name=now]").content) - Date.now() / 1000;
const CLOCK_SECONDS = 3;

export const now = () => Date.now() / 1000 + (Math.abs(off) > CLOCK_SECONDS ? off : 0);

// The header ----------------------------------------------------------------------------------------------------------

let streamLost = "connecting", meshTrouble = "";

function showLive() {
  const live = $("live");
  if (!live) return;
  live.dataset.state = streamLost || meshTrouble ? "lost" : "live";
  say(live.querySelector(".words"), streamLost || (meshTrouble ? "not live" : "live"));
  const banner = $("banner");
  if (banner.dataset.ended) return;
  banner.hidden = !meshTrouble || meshTrouble === "connecting";
  if (!banner.hidden) say(banner, `The mesh does not answer; this is what was last known. ${meshTrouble}`);
}

/** Show whether a page without a stream of tables is live; "" if it is. */
export function live(lost) { streamLost = lost; showLive(); }

export function sessionEnded() {
  const banner = $("banner");
  banner.dataset.ended = "yes";
  banner.hidden = false;
  banner.replaceChildren("Your session has ended. ", el("a", { href: "/login" }, "Log in again"));
  streamLost = "ended";
  showLive();
}

function onMeta(row, also) {
  if (row.id === "watch") { meshTrouble = row.trouble; showLive(); }
  if (row.id === "mesh" && $("problems")) {
    const number = (row.problems || []).length;
    $("problems").hidden = !number;
    say($("problems"), String(number || ""));
    $("problems").setAttribute("aria-label", plural(number, "problem"));
  }
  also?.(row);
}

// The stream ----------------------------------------------------------------------------------------------------------

/** Follow tables of the server. A page that cannot be seen holds no connection; it resumes where it was. */
export function follow(url, tables, { onMeta: also } = {}) {
  let source = null, last = "", waiting = 0;
  const handlers = { meta: (batch) => batch.rows.forEach((row) => onMeta(row, also)), ...tables };
  function open() {
    clearTimeout(waiting);
    source = new EventSource(last ? `${url}?after=${encodeURIComponent(last)}` : url);
    source.onopen = () => { streamLost = ""; showLive(); };
    source.onerror = () => { streamLost = "reconnecting"; showLive(); if (source.readyState === EventSource.CLOSED) refused(); };
    source.addEventListener("session", () => { close(); sessionEnded(); });
    for (const [name, handler] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => { if (event.lastEventId) last = event.lastEventId; handler(JSON.parse(event.data)); });
    }
  }
  async function refused() {
    close();
    try {
      if ((await fetch("/api/forecasts?ids=")).status === 401) { sessionEnded(); return; }
    } catch { /* the server is away */ }
    waiting = setTimeout(open, 2000);
  }
  function close() { clearTimeout(waiting); source?.close(); source = null; }
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else if (!source && !$("banner").dataset.ended) open();
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", (event) => { if (event.persisted && !source) open(); });
  open();
}

/** Ask the server; its refusals are errors with its words. */
export async function ask(url, body) {
  const options = body === undefined ? {} : {
    method: "POST", body: JSON.stringify(body),
    headers: { "content-type": "application/json", "x-csrf-token": document.querySelector("meta[name=csrf]").content },
  };
  const response = await fetch(url, options);
  if (response.status === 401) sessionEnded();
  const answer = await response.json().catch(() => ({ error: `the server answered with ${response.status}` }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

// Forecasts in words --------------------------------------------------------------------------------------------------

/** Return when a job will start or finish: words for a column, and a band in seconds from now if there is one. */
export function expected(phase, found) {
  const age = found?.read_at ? now() - found.read_at : 0;
  const forecast = found?.forecast, estimate = found?.estimate;
  const later = (value) => (value === null || value === undefined ? null : Math.max(0, value - age));
  if (phase === "queued" && forecast) {
    if (forecast.start_seconds === null) return { words: forecast.of_unknown ? "unknown" : `after ${short(forecast.reached_seconds)}`, unknown: true };
    const [median, low, high] = [forecast.start_seconds, forecast.start_p10_seconds, forecast.start_p90_seconds].map(later);
    return { verb: "starts", words: `starts in ${short(median)}`, median, low: low ?? median, high, draws: forecast.draws };
  }
  if (["running", "starting", "stopping"].includes(phase) && estimate?.predictable && estimate.remaining_seconds !== null) {
    const [median, low, high] = [estimate.remaining_seconds, estimate.remaining_p10_seconds, estimate.remaining_p90_seconds].map(later);
    return { verb: "ends", words: `ends in ${short(median)}`, median, low, high, confidence: estimate.confidence };
  }
  return null;
}

export function copyLine(line) {
  const button = el("button", { type: "button", class: "quiet" }, "Copy");
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(line); say(button, "Copied"); } catch { say(button, "Select it, and copy"); }
    setTimeout(() => say(button, "Copy"), 2000);
  });
  return el("p", { class: "copy" }, el("code", {}, line), button);
}

// Keys ----------------------------------------------------------------------------------------------------------------

const keys = new Map();
export const onKey = (key, handler) => keys.set(key, handler);
let before = "";

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea")) {
    if (event.key === "Escape" && !event.target.value) event.target.blur();
    return;
  }
  const pages = { j: "/", q: "/queue", c: "/cluster", t: "/tenants", p: "/predictions", i: "/incidents", l: "/lab", m: "/mesh" };
  if (before === "g" && pages[event.key]) { before = ""; location.href = pages[event.key]; return; }
  before = event.key;
  if (event.key === "?") $("help").showModal();
  else if (keys.has(event.key)) keys.get(event.key)(event);
  else return;
  event.preventDefault();
});
document.querySelector("nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
$("help-button")?.addEventListener("click", () => $("help").showModal());
