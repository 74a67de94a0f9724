// A shell in a running job: xterm.js here, the session of `cotenant exec` there.
import { $, live, say, sessionEnded } from "./page.js";
import { Terminal } from "./vendor/xterm.js";
import { FitAddon } from "./vendor/xterm-fit.js";

const { id, rank } = $("shell").dataset, csrf = document.querySelector("meta[name=csrf]").content;
const CHUNK = 16000, QUIET_SECONDS = 20; // characters of a request; without a sign of life, the connection is lost
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const theme = () => ({ background: css("--surface"), foreground: css("--text"), cursor: css("--accent"), cursorAccent: css("--surface"), selectionBackground: css("--soft"),
  black: "#3b4048", red: css("--red"), green: css("--green"), yellow: css("--amber"), blue: css("--blue"), magenta: css("--accent"), cyan: "#2a8a99", white: "#9aa3b0" });

// The page's policy forbids the style elements and attributes that xterm.js writes, but not the object model.
const documentOverride = new Proxy(document, {
  get(target, name) {
    const found = Reflect.get(target, name, target);
    if (name === "createElement") return (kind) => (kind === "style" ? styleSheet() : target.createElement(kind));
    return typeof found === "function" ? found.bind(target) : found;
  },
});
HTMLSpanElement.prototype.setAttribute = function (name, value) {
  if (name === "style") this.style.cssText = value;
  else Element.prototype.setAttribute.call(this, name, value);
};

/** Return an element whose text is a style sheet of the document, though it is no style element. */
function styleSheet() {
  const sheet = new CSSStyleSheet();
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  return Object.defineProperty(document.createElement("template"), "textContent", { set: (text) => sheet.replaceSync(text) });
}

const terminal = new Terminal({ documentOverride, theme: theme(), fontFamily: "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace", fontSize: 13, cursorBlink: false, scrollback: 5000, screenReaderMode: true, minimumContrastRatio: 4.5, linkHandler: { activate() {} } });
const fit = new FitAddon();
terminal.loadAddon(fit);
terminal.open($("terminal"));
fit.fit();

let shell = "", reading = null, waiting = "", sending = false, heard = 0;

// From the shell ------------------------------------------------------------------------------------------------------

const handlers = {
  opened: (told) => { shell = told.shell; say($("state"), "Open."); live(""); },
  output: (data) => new Promise((done) => terminal.write(Uint8Array.from(atob(data), (one) => one.charCodeAt(0)), done)),
  ended: (told) => told.why,
  session: () => { sessionEnded(); return "your session has ended"; },
};

async function open() {
  reading = new AbortController();
  $("again").hidden = true;
  say($("state"), "connecting");
  terminal.reset();
  terminal.focus();
  let why = "";
  try {
    why = await read(reading.signal) || "the connection was lost, and with it the shell";
  } catch (error) {
    why = error instanceof TypeError || error.name === "AbortError" ? "the connection was lost, and with it the shell" : error.message;
  }
  shell = waiting = "";
  reading = null;
  say($("state"), `${capital(why)}${/[.!?]$/.test(why) ? "" : "."}`);
  live("ended");
  $("again").hidden = false;
  $("again").focus();
}

/** Open a shell and show its output; return why it ended, "" without a reason. */
async function read(signal) {
  const body = { rows: terminal.rows, columns: terminal.cols, ...(rank && { rank: Number(rank) }) };
  const answer = await post(`/api/jobs/${encodeURIComponent(id)}/shell`, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const watch = setInterval(() => { if (performance.now() - heard > 1000 * QUIET_SECONDS) reading?.abort(); }, 1000);
  heard = performance.now();
  try {
    for (let text = ""; ;) {
      const { done, value } = await reader.read();
      heard = performance.now();
      if (done) return "";
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        const [, name, data] = /^event: (\w+)\ndata: (.*)$/s.exec(event) || [];
        const why = name && await handlers[name]?.(JSON.parse(data));
        if (why) { reader.cancel(); return why; }
      }
    }
  } finally {
    clearInterval(watch);
  }
}

async function post(url, body, signal) {
  const answer = await fetch(url, { method: "POST", signal, body: JSON.stringify(body), headers: { "content-type": "application/json", "x-csrf-token": csrf } });
  if (answer.ok) return answer;
  if (answer.status === 401) sessionEnded();
  throw new Error((await answer.json().catch(() => ({}))).error || `the server answered with ${answer.status}`);
}

// To the shell --------------------------------------------------------------------------------------------------------

terminal.onData((data) => { if (shell) { waiting += data; send(); } });
terminal.onResize(({ rows, cols }) => { if (shell) post(`/api/shells/${shell}`, { rows, columns: cols }).catch(() => {}); });

/** Send what was typed, in its order: one request at a time, with all that was typed meanwhile in the next. */
async function send() {
  if (sending) return;
  sending = true;
  while (waiting && shell) {
    let length = Math.min(CHUNK, waiting.length);
    if (length < waiting.length && /[\uD800-\uDBFF]/.test(waiting[length - 1])) length += 1; // not between two halves
    const data = waiting.slice(0, length);
    waiting = waiting.slice(length);
    try {
      await post(`/api/shells/${shell}`, { data });
      if (shell) say($("state"), "Open.");
    } catch (error) {
      waiting = "";
      if (error instanceof TypeError) reading?.abort(); // the server is away
      else if (shell) say($("state"), `${capital(error.message)}.`);
    }
  }
  sending = false;
}

terminal.attachCustomKeyEventHandler((event) => {
  if (event.key !== "Enter" || !event.ctrlKey || !event.shiftKey) return true;
  if (event.type === "keydown") document.querySelector(".crumb a:last-of-type").focus();
  return false;
});
let sizing = 0;
new ResizeObserver(() => { clearTimeout(sizing); sizing = setTimeout(() => fit.fit(), 100); }).observe($("terminal"));
addEventListener("themechange", () => { terminal.options.theme = theme(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { terminal.options.theme = theme(); });
$("again").addEventListener("click", open);
$("rank")?.addEventListener("change", () => { location.search = `?rank=${$("rank").value}`; });
addEventListener("pagehide", () => reading?.abort());
open();
