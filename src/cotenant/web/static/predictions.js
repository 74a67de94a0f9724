// Predictions: what was promised to jobs that have succeeded, against how long they ran.
import { $, bar, copyLine, duration, el, follow, gap, now, percent, plural, say, short } from "./page.js";
import { virtualRows } from "./rows.js";

const EXPLAINED_JOBS_MIN = 10; // of fewer jobs, the share is mostly chance
const jobs = new Map(), list = $("list"), rows = virtualRows({ list, scroller: $("scroller"), makeRow, fill });
let state = null, judged = [], pending = 0;
const later = () => { pending ||= requestAnimationFrame(arrange); };
const times = (factor) => `${factor < 10 ? factor.toFixed(2) : Math.round(factor)}×`;

function arrange() {
  pending = 0;
  if (!state) return;
  judged = [...jobs.values()].sort((a, b) => b.ended - a.ended || (a.id < b.id ? -1 : 1));
  gap($("gap"), state, "Ended jobs are");
  $("away").hidden = !state.away;
  if (state.away) say($("away"), `The predictor does not answer: new jobs are not predicted now. ${state.away}`);
  $("judged").hidden = !judged.length;
  showVerdict();
  if (!judged.length) return;
  showRecords();
  showCalibration();
  rows.set(judged);
  plot();
}

function showVerdict() {
  const all = state.overall;
  if (all) {
    say($("verdict"), `Half of the ${plural(all.jobs, "prediction")} ${all.jobs === 1 ? "was" : "were"} off by at most ${times(all.median_factor)}; ${percent(all.within_twice)} lie within twice`);
    const [low, high] = state.ratios;
    say($("words"), `8 of 10 jobs ran between ${times(low)} and ${times(high)} of what was promised when they last started. Of the last ${state.jobs_max.toLocaleString("en")} jobs that succeeded.`);
    say($("coverage"), state.banded ? `The promised band between the 10th and the 90th percentile held for ${state.covered.toLocaleString("en")} of ${plural(state.banded, "job")} that had one (${percent(state.covered / state.banded)}); it should hold for 80 %.` : "None of these jobs had been promised a band, so how often it holds is not known.");
  } else if (state.trouble) say($("verdict"), "The record is unknown");
  else say($("verdict"), "No prediction has been judged yet");
  const nothing = !all && !state.trouble;
  $("empty").hidden = !nothing;
  if (nothing && !$("empty").firstChild) {
    $("empty").append(el("h2", {}, "No job whose run time was predicted has succeeded yet"), el("p", { class: "muted" }, `${state.predictors.length ? `${state.predictors.join(", ")} ${state.predictors.length === 1 ? "predicts" : "predict"}. ` : ""}A job that states its steps and reports progress, or that ran before under the same name, is predicted:`), copyLine("cotenant predict job --model resnet50 --gpus 1 --steps 90000"));
  }
}

function showRecords() {
  $("records").replaceChildren(...state.records.map((one) => el("tr", {}, el("td", {}, one.predictor), el("td", {}, one.tenant || "all"), el("td", { class: "number" }, one.jobs.toLocaleString("en")), el("td", { class: "number" }, times(one.median_factor)),
    el("td", { class: "number" }, percent(one.within_twice)), el("td", { class: "number" }, one.bias.toFixed(2)), el("td", { class: "number" }, one.explained === null || one.jobs < EXPLAINED_JOBS_MIN ? "–" : percent(one.explained)))));
}

function showCalibration() {
  say($("calibration-words"), "Predictions that are surer should be right more often. The mark is their mean confidence.");
  $("calibration").replaceChildren(...state.calibration.map((one) => el("tr", {}, el("td", {}, `${percent(one.confidence_min)} to ${percent(one.confidence_max)}`), el("td", { class: "number" }, one.jobs.toLocaleString("en")),
    el("td", { class: "number" }, percent(one.within_twice)), el("td", { class: "wide" }, bar(one.within_twice, one.confidence)))));
}

// The plot ------------------------------------------------------------------------------------------------------------

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const TICKS = [1, 10, 60, 600, 3600, 36000, 86400, 864000, 8640000], LABEL = 40;

function plot() {
  const canvas = $("plot"), width = Math.max(200, canvas.parentElement.clientWidth - 32), height = Math.min(320, width), ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d"), left = 52, bottom = 34, log = (value) => Math.log(Math.max(1, value));
  ctx.scale(ratio, ratio);
  const values = judged.flatMap((one) => [one.promised, one.ran]), low = log(Math.min(...values)) - 0.5, high = log(Math.max(...values)) + 0.5;
  const x = (value) => left + ((log(value) - low) / (high - low)) * (width - left - 8), y = (value) => height - bottom - ((log(value) - low) / (high - low)) * (height - bottom - 8);
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, 8, width - left - 8, height - bottom - 8);
  ctx.clip();
  const ends = [Math.exp(low) / 4, Math.exp(high) * 4], at = (value, factor) => [left + ((Math.log(value) - low) / (high - low)) * (width - left - 8), height - bottom - ((Math.log(value * factor) - low) / (high - low)) * (height - bottom - 8)];
  ctx.fillStyle = css("--soft");
  ctx.beginPath();
  ctx.moveTo(...at(ends[0], 2)); ctx.lineTo(...at(ends[1], 2)); ctx.lineTo(...at(ends[1], 0.5)); ctx.lineTo(...at(ends[0], 0.5));
  ctx.fill();
  ctx.strokeStyle = css("--muted");
  ctx.beginPath(); ctx.moveTo(...at(ends[0], 1)); ctx.lineTo(...at(ends[1], 1)); ctx.stroke();
  ctx.strokeStyle = css("--accent");
  ctx.globalAlpha = 0.35;
  for (const one of judged.filter((job) => job.band)) { ctx.beginPath(); ctx.moveTo(x(one.band[0]), y(one.ran)); ctx.lineTo(x(one.band[1]), y(one.ran)); ctx.stroke(); }
  ctx.fillStyle = css("--accent");
  ctx.globalAlpha = 0.6;
  for (const one of judged) { ctx.beginPath(); ctx.arc(x(one.promised), y(one.ran), 3.5, 0, 2 * Math.PI); ctx.fill(); }
  ctx.restore();
  axes(ctx, { x, y, left, bottom, width, height, low, high });
}

function axes(ctx, { x, y, left, bottom, width, height, low, high }) {
  ctx.strokeStyle = css("--line");
  ctx.strokeRect(left, 8, width - left - 8, height - bottom - 8);
  ctx.fillStyle = css("--muted");
  ctx.font = "11px system-ui";
  let before = -Infinity;
  for (const tick of TICKS.filter((one) => Math.log(one) > low && Math.log(one) < high)) {
    if (x(tick) - before < LABEL) continue;
    before = x(tick);
    ctx.textAlign = "center"; ctx.fillText(short(tick), x(tick), height - bottom + 14);
    ctx.textAlign = "right"; ctx.fillText(short(tick), left - 6, y(tick) + 4);
  }
  ctx.textAlign = "right"; ctx.fillText("promised", width - 8, height - 4);
  ctx.save();
  ctx.translate(11, 8); ctx.rotate(-Math.PI / 2); ctx.fillText("actual", 0, 0);
  ctx.restore();
}

addEventListener("themechange", later);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
addEventListener("resize", later);

// Rows ----------------------------------------------------------------------------------------------------------------

function makeRow() {
  const cell = (name) => el("span", { role: "cell", class: name }), link = el("a", {}), id = el("code", { class: "id" });
  const name = cell("c-name"), cells = { tenant: cell("c-tenant"), by: cell("p-by"), promised: cell("number"), ran: cell("number"), off: cell("number"), sure: cell("number p-more"), age: cell("c-age number") };
  name.append(link, id);
  return { ...cells, link, id, root: el("div", { role: "row", class: "row" }, name, ...Object.values(cells)) };
}

function fill(row, one, changed) {
  if (changed) {
    row.link.href = `/jobs/${encodeURIComponent(one.job)}`;
    say(row.link, one.name || one.job);
    say(row.id, one.name ? one.job : "");
    say(row.tenant, one.tenant || "–");
    say(row.by, one.predictor);
    say(row.promised, duration(one.promised));
    say(row.ran, duration(one.ran));
    const ratio = Math.max(1, one.promised) / Math.max(1, one.ran);
    say(row.off, times(Math.max(ratio, 1 / ratio)));
    row.off.title = ratio > 1 ? "It ended sooner than promised." : ratio < 1 ? "It ran longer than promised." : "";
    say(row.sure, percent(one.confidence));
  }
  say(row.age, `${short(now() - one.ended)} ago`);
}

follow("/events/predictions", {
  board(batch) {
    if (batch.whole) jobs.clear();
    for (const id of batch.removed) jobs.delete(id);
    for (const row of batch.rows) { if (row.id === "state") state = row; else jobs.set(row.id, row); }
    later();
  },
});
