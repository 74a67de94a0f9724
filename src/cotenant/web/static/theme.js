// Light or dark, as chosen; runs before the page is painted.
(() => {
  const root = document.documentElement;
  let chosen = "";
  try { chosen = localStorage.getItem("theme") || ""; } catch { /* private window */ }
  if (chosen) root.dataset.theme = chosen;
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      try { localStorage.setItem("theme", root.dataset.theme); } catch { /* private window */ }
      dispatchEvent(new Event("themechange"));
    });
  });
})();
