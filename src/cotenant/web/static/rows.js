// A list of which only the visible rows are in the document.
import { ask, el, now, onKey } from "./page.js";

const AHEAD = 8, ASKED_MAX = 60, KEPT_MAX = 5000, FRESH_SECONDS = 5;

/**
 * Return a list of items with ids. Rows are pooled by id, so that the focus stays with the item when the order changes.
 * `makeRow` returns a row with its `root` and the `link` that gets the focus; `fill` shows an item in it.
 */
export function virtualRows({ list, scroller, makeRow, fill, drawn = () => {} }) {
  const spacer = el("div", { class: "spacer", role: "presentation" }), pool = new Map();
  let items = [], height = 0, drawing = 0, focused = "";
  scroller.append(spacer);
  const rowHeight = () => (height ||= parseFloat(getComputedStyle(list).getPropertyValue("--row")) || 44);
  const focusedRow = () => pool.get(document.activeElement?.dataset.row);

  function show(row, item, index) {
    row.root.style.transform = `translateY(${index * rowHeight()}px)`;
    row.root.setAttribute("aria-rowindex", index + 2);
    row.link.dataset.row = item.id;
    fill(row, item, row.item !== item);
    row.item = item;
  }

  function draw() {
    const from = Math.max(0, Math.floor(scroller.scrollTop / rowHeight()) - AHEAD);
    const to = Math.min(items.length, Math.ceil((scroller.scrollTop + scroller.clientHeight) / rowHeight()) + AHEAD);
    const visible = new Map(items.slice(from, to).map((item, place) => [item.id, from + place]));
    const active = focusedRow()?.item.id;
    const place = active && !visible.has(active) ? items.findIndex((item) => item.id === active) : -1;
    if (place >= 0) visible.set(active, place); // an element that leaves the document loses the focus
    const free = [];
    for (const [id, row] of pool) if (!visible.has(id)) { pool.delete(id); free.push(row); }
    for (const [id, index] of visible) {
      let row = pool.get(id);
      if (!row) {
        row = free.pop() || makeRow();
        pool.set(id, row);
        if (!row.root.isConnected) spacer.append(row.root);
      }
      show(row, items[index], index);
    }
    for (const row of free) row.root.remove();
    drawn();
  }

  function move(step) {
    if (!items.length) return;
    focused = focusedRow()?.item.id || focused;
    const index = Math.min(items.length - 1, Math.max(0, items.findIndex((item) => item.id === focused) + step));
    focused = items[index].id;
    const top = index * rowHeight();
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    if (top + rowHeight() > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + rowHeight() - scroller.clientHeight;
    draw();
    pool.get(focused)?.link.focus({ preventScroll: true });
  }

  function set(next) {
    items = next;
    list.setAttribute("aria-rowcount", items.length + 1);
    spacer.style.height = `${items.length * rowHeight()}px`;
    list.style.setProperty("--rows-height", spacer.style.height);
    draw();
  }

  onKey("j", () => move(1));
  onKey("k", () => move(-1));
  scroller.addEventListener("scroll", () => { drawing ||= requestAnimationFrame(() => { drawing = 0; draw(); }); }, { passive: true });
  addEventListener("resize", () => { height = 0; set(items); });
  setInterval(() => { if (!document.hidden) draw(); }, 1000);
  return { set, draw, visible: () => [...pool.values()].map((row) => row.item).filter(Boolean) };
}

/** Keep the server's answers for ids on the screen; each is asked again after some seconds. */
export function answers(url, changed = () => {}) {
  const known = new Map();
  let asking = 0, wanted = [];
  async function read() {
    asking = 0;
    const due = wanted.filter((id) => !((known.get(id)?.asked_at || 0) > now() - FRESH_SECONDS)).slice(0, ASKED_MAX);
    if (!due.length || document.hidden) return;
    let found = {};
    try { found = await ask(`${url}?ids=${due.map(encodeURIComponent).join(",")}`); } catch { /* asked again later */ }
    if (known.size > KEPT_MAX) known.clear();
    for (const id of due) known.set(id, { ...known.get(id), ...found[id], asked_at: now() });
    changed();
  }
  function want(ids) {
    wanted = ids;
    asking ||= setTimeout(read, 250); // not later with each change: a list may change all the time
  }
  return { known, want };
}
