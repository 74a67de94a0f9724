// The mesh: what is wrong and what helps, then who serves.
import { $, copyLine, duration, el, follow, now, plural, say } from "./page.js";

const GOOD = ["leads", "follows", "serves"];
const ms = (seconds) => (seconds === null || seconds === undefined ? "–" : `${(1000 * seconds).toFixed(1)} ms`);

const SOON_SECONDS = 30 * 86400;

/** Show until when the certificates are valid, the first to expire first, and which releases are in use. */
function showCertificates(mesh) {
  const found = (mesh.certificates || []).map((one) => ({ ...one, left: Date.parse(one.expire_time) / 1000 - now() })).sort((a, b) => a.left - b.left);
  $("certificates-card").hidden = !found.length;
  $("certificates").replaceChildren(...found.slice(0, 200).map((one) => el("tr", {}, el("td", {}, el("code", {}, one.where)),
    el("td", {}, el("span", { class: "tag", "data-kind": one.left < 0 ? "bad" : one.left < SOON_SECONDS ? "warn" : "ok" }, one.left < 0 ? `expired ${duration(-one.left)} ago` : `valid for ${duration(one.left)}`)),
    el("td", {}, new Date(one.expire_time).toLocaleDateString("en-CA")))));
}

/** Return who leads, and what runs which release, in a sentence. */
function summary(mesh) {
  const leads = mesh.processes.filter((one) => one.state === "leads").map((one) => `${one.service} is led by ${one.address}`), releases = [...new Set(mesh.processes.map((one) => one.release).filter(Boolean))];
  const versions = releases.length > 1 ? `${plural(releases.length, "release")} run side by side: ${releases.join(", ")}` : releases.length ? `all run release ${releases[0]}` : "";
  return [leads.length ? leads.join(", ") : "No service is led: each has one process", versions].filter(Boolean).join("; ");
}

function show(mesh) {
  if (mesh.trouble) { say($("verdict"), "The mesh does not answer"); $("problem-list").replaceChildren(el("p", { class: "warning" }, mesh.trouble)); return; }
  say($("verdict"), mesh.problems.length ? plural(mesh.problems.length, "problem") : "The mesh is well");
  say($("summary"), `${summary(mesh)}.`);
  showCertificates(mesh);
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
