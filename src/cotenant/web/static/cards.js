// A grid of cards of which only the visible ones are in the document. The window scrolls.
import { onKey } from "./page.js";

const GAP = 12, AHEAD = 300;

/**
 * Return a grid of items with ids. Cards are pooled by id. `heightOf` returns a card's height from the item and the card's
 * width, without asking the browser; `makeCard` returns a card with its `root` and the `link` that gets the focus.
 */
export function virtualCards({ list, least, makeCard, fill, heightOf, drawn = () => {} }) {
  const pool = new Map();
  let items = [], tops = [0], columns = 1, width = least, origin = 0, drawing = 0, view = innerHeight, focused = "";

  /** Ask the browser where things are; never while the page scrolls. */
  function measure() {
    const box = list.getBoundingClientRect();
    origin = box.top + scrollY;
    view = innerHeight;
    columns = Math.max(1, Math.floor((box.width + GAP) / (least + GAP)));
    width = (box.width - GAP * (columns - 1)) / columns;
  }

  function arrange() {
    measure();
    tops = [0];
    for (let at = 0; at < items.length; at += columns) {
      const tallest = Math.max(...items.slice(at, at + columns).map((item) => heightOf(item, width)));
      tops.push(tops.at(-1) + tallest + GAP);
    }
    list.style.height = `${Math.max(0, tops.at(-1) - GAP)}px`;
    draw(true);
  }

  function rowAt(y) {
    let low = 0, high = tops.length - 2;
    while (low < high) { const middle = (low + high + 1) >> 1; if (tops[middle] <= y) low = middle; else high = middle - 1; }
    return Math.max(0, low);
  }

  function draw(moved) {
    const y = scrollY - origin, from = rowAt(y - AHEAD) * columns, to = items.length ? Math.min(items.length, (rowAt(y + view + AHEAD) + 1) * columns) : 0;
    const wanted = new Map();
    for (let at = from; at < to; at++) wanted.set(items[at].id, at);
    const active = pool.has(document.activeElement?.dataset.card) ? document.activeElement.dataset.card : "";
    if (active && !wanted.has(active)) { const at = items.findIndex((item) => item.id === active); if (at >= 0) wanted.set(active, at); }
    const free = [];
    for (const [id, card] of pool) if (!wanted.has(id)) { pool.delete(id); free.push(card); }
    for (const [id, at] of wanted) {
      let card = pool.get(id);
      const fresh = !card;
      if (fresh) {
        card = free.pop() || makeCard();
        pool.set(id, card);
        if (!card.root.isConnected) list.append(card.root);
      }
      if (fresh || moved || card.at !== at) {
        card.at = at;
        card.root.style.transform = `translate(${(at % columns) * (width + GAP)}px, ${tops[Math.floor(at / columns)]}px)`;
        card.root.style.width = `${width}px`;
        card.root.style.height = `${tops[Math.floor(at / columns) + 1] - tops[Math.floor(at / columns)] - GAP}px`;
        card.root.setAttribute("aria-posinset", at + 1);
        card.root.setAttribute("aria-setsize", items.length);
        card.link.dataset.card = id;
      }
      if (fresh || moved || card.item !== items[at]) { card.item = items[at]; fill(card, items[at], width); }
    }
    for (const card of free) card.root.remove();
    drawn([...pool.values()].map((card) => card.item));
  }

  function show(id, focus = true) {
    const at = items.findIndex((item) => item.id === id);
    if (at < 0) return;
    focused = id;
    const row = Math.floor(at / columns), top = origin + tops[row], bottom = origin + tops[row + 1];
    if (top < scrollY || bottom > scrollY + view) scrollTo({ top: Math.max(0, top - view / 3) });
    draw(false);
    if (focus) pool.get(id)?.link.focus({ preventScroll: true });
  }

  function move(step) {
    if (!items.length) return;
    focused = document.activeElement?.dataset.card || focused;
    show(items[Math.min(items.length - 1, Math.max(0, items.findIndex((item) => item.id === focused) + step))].id);
  }

  onKey("j", () => move(1));
  onKey("k", () => move(-1));
  addEventListener("scroll", () => { drawing ||= requestAnimationFrame(() => { drawing = 0; draw(false); }); }, { passive: true });
  new ResizeObserver(() => { drawing ||= requestAnimationFrame(() => { drawing = 0; arrange(); }); }).observe(document.body);
  return {
    set(next) { items = next; arrange(); },
    /** Show an item that has changed, if it is on the screen; its height is the same. */
    put(at, item) { items[at] = item; const card = pool.get(item.id); if (card) { card.item = item; fill(card, item, width); } },
    redraw() { draw(true); },
    show,
  };
}
