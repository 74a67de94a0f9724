// Tables of pages and reports: a click on a heading sorts, and a row under the pointer lifts its lines in the plots.

(() => {
  const value = (cell) => {
    const text = (cell?.firstElementChild?.textContent || cell?.textContent || "").trim(), number = Number.parseFloat(text.replace(/[,×+\s]/g, ""));
    return Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : typeof a === typeof b ? a.localeCompare(b) : typeof a === "number" ? -1 : 1);

  function sort(table, head, column) {
    const down = head.getAttribute("aria-sort") === "ascending", body = table.tBodies[0];
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows], fixed = rows.filter((row) => row.matches(".bound"));
    const moved = rows.filter((row) => !row.matches(".bound")).sort((a, b) => (down ? -1 : 1) * compare(value(a.cells[column]), value(b.cells[column])));
    body.append(...moved, ...fixed);
  }

  for (const table of document.querySelectorAll("table[data-sortable]")) {
    [...(table.tHead?.rows[0]?.cells || [])].forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => sort(table, head, column));
    });
  }

  const root = document.documentElement.style, arms = [...document.querySelectorAll("[data-arm]")].map((row) => row.dataset.arm);
  for (const row of document.querySelectorAll("[data-arm]")) {
    const lift = () => { for (const arm of new Set(arms)) if (arm !== row.dataset.arm) root.setProperty(`--${arm}`, "var(--faint)"); };
    const drop = () => { for (const arm of new Set(arms)) root.removeProperty(`--${arm}`); };
    row.addEventListener("pointerenter", lift);
    row.addEventListener("pointerleave", drop);
    row.addEventListener("focusin", lift);
    row.addEventListener("focusout", drop);
  }
})();
