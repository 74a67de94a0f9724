// The mesh: what is wrong and what helps, then who serves.
import { $, copyLine, el, follow, plural, say } from "./page.js";

const GOOD = ["leads", "follows", "serves"];
const ms = (seconds) => (seconds === null || seconds === undefined ? "–" : `${(1000 * seconds).toFixed(1)} ms`);

function show(mesh) {
  if (mesh.trouble) { say($("verdict"), "The mesh does not answer"); $("problem-list").replaceChildren(el("p", { class: "warning" }, mesh.trouble)); return; }
  say($("verdict"), mesh.problems.length ? plural(mesh.problems.length, "problem") : "The mesh is well");
  $("problem-list").replaceChildren(...mesh.problems.map((one) => el("article", { class: "card problem" },
    el("h2", {}, `${one.where}: ${one.what}`), el("p", { class: "muted" }, one.remedy), ...one.commands.map(copyLine))));
  $("services").replaceChildren(...mesh.processes.map((one) => el("tr", {},
    el("td", {}, one.service), el("td", {}, el("span", { class: "tag", "data-kind": GOOD.includes(one.state) ? "ok" : "bad" }, one.state)),
    el("td", {}, el("code", {}, one.address || "–"), one.leader && one.state !== "leads" ? el("span", { class: "muted" }, ` leader ${one.leader}`) : ""),
    el("td", {}, one.release || "–"), el("td", { class: "number" }, ms(one.store_latency?.median_seconds)))));
  $("store-card").hidden = !mesh.store.length;
  $("store").replaceChildren(...mesh.store.map((one) => el("tr", {}, el("td", {}, el("code", {}, one.name || one.id || one.endpoint || "member")),
    el("td", {}, one.release || "away"), el("td", { class: "number" }, one.size_bytes ? `${(one.size_bytes / 2 ** 20).toFixed(1)} MiB` : "–"))));
}

follow("/events/mesh", {}, { onMeta(row) { if (row.id === "mesh") show(row); } });
