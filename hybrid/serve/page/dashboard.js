// The dashboard: /metrics every two seconds, rates from the differences, quantiles from the histograms' differences.
import { $, make } from "/page/dom.js";
import { getJson, getText, keyField, readiness } from "/page/server.js";

const EVERY = 2000, KEPT = 150, SVG = "http://www.w3.org/2000/svg";
let before = null;
const lines = new Map();

function parsed(text) {
  const found = { at: performance.now() / 1000, series: new Map() };
  for (const line of text.split("\n")) {
    const m = /^([a-z_]+)(?:\{([^}]*)\})? (\S+)$/.exec(line);
    if (!m) continue;
    const labels = Object.fromEntries([...(m[2] ?? "").matchAll(/(\w+)="([^"]*)"/g)].map((l) => [l[1], l[2]]));
    if (!found.series.has(m[1])) found.series.set(m[1], []);
    found.series.get(m[1]).push({ labels, value: Number(m[3]) });
  }
  return found;
}

const total = (s, name) => (s.series.get(name) ?? []).reduce((sum, v) => sum + v.value, 0);
const has = (s, name) => s.series.has(name);
const rate = (now, name) => (before ? Math.max(0, total(now, name) - total(before, name)) / (now.at - before.at) : 0);
const busy = (now, name, unit) => {
  const seconds = rate(now, "hybrid_device_seconds_total");
  return seconds ? rate(now, name) / seconds / unit : null;
};

function quantile(now, name, q) {
  // Of observations since the last sample; linear within a bucket.
  const counts = (s) => (s?.series.get(`${name}_bucket`) ?? []).map((b) => [b.labels.le === "+Inf" ? Infinity : Number(b.labels.le), b.value]);
  const old = new Map(counts(before)), fresh = counts(now).map(([le, n]) => [le, n - (old.get(le) ?? 0)]);
  const all = fresh.at(-1)?.[1] ?? 0;
  if (!all) return null;
  let low = 0, below = 0;
  for (const [le, n] of fresh) {
    if (n >= q * all) return le === Infinity ? low : low + (le - low) * ((q * all - below) / Math.max(n - below, 1));
    low = le;
    below = n;
  }
  return low;
}

const three = (v) => (v === null ? "–" : Number.isInteger(v) ? String(v) : v >= 100 ? v.toFixed(0) : v >= 10 ? v.toFixed(1) : v.toFixed(2));
const ms = (v) => (v === null ? null : v * 1000);

const CARDS = [
  ["Tokens generated", "per second", (s) => rate(s, "hybrid_generated_tokens_total")],
  ["Tokens of prompts", "per second", (s) => rate(s, "hybrid_prompt_tokens_total")],
  ["Running", "requests", (s) => total(s, "hybrid_running")],
  ["Waiting", "requests", (s) => total(s, "hybrid_waiting")],
  ["Prompt tokens from the cache", "%", (s) => {
    const asked = rate(s, "hybrid_prompt_tokens_total");
    return asked ? (100 * rate(s, "hybrid_cached_tokens_total")) / asked : null;
  }],
  ["Time to first token, median", "ms", (s) => ms(quantile(s, "hybrid_time_to_first_token_seconds", 0.5))],
  ["Time to first token, p95", "ms", (s) => ms(quantile(s, "hybrid_time_to_first_token_seconds", 0.95))],
  ["Between tokens, median", "ms", (s) => ms(quantile(s, "hybrid_inter_token_seconds", 0.5))],
  ["Between tokens, p95", "ms", (s) => ms(quantile(s, "hybrid_inter_token_seconds", 0.95))],
  ["Device busy", "% of the time", (s) => 100 * rate(s, "hybrid_device_seconds_total")],
  ["Memory traffic while busy", "GB/s", (s) => busy(s, "hybrid_device_bytes_total", 1e9)],
  ["Arithmetic while busy", "GFLOPS", (s) => busy(s, "hybrid_device_operations_total", 1e9)],
  ["Device passes", "per second", (s) => rate(s, "hybrid_passes_total")],
  ["Preemptions and evictions", "per second", (s) => rate(s, "hybrid_preemptions_total") + rate(s, "hybrid_evictions_total")],
  ["Memory of the process", "MiB", (s) => total(s, "process_resident_memory_bytes") / 2 ** 20],
  ["Power of the device", "W", (s) => (has(s, "hybrid_device_joules_total") ? rate(s, "hybrid_device_joules_total") : undefined)],
];

function card(title, unit) {
  const value = make("div", { class: "value" }), svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 48");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.append(...["polygon", "polyline"].map((shape) => document.createElementNS(SVG, shape)));
  const box = make("article", { class: "card" }, make("h2", {}, title), value, svg);
  $("cards").append(box);
  return { box, value, svg, unit, past: [] };
}

function show(title, unit, value) {
  if (!lines.has(title)) lines.set(title, card(title, unit));
  const c = lines.get(title);
  c.box.hidden = value === undefined;
  if (value === undefined) return;
  c.value.replaceChildren(three(value), make("small", {}, unit));
  c.past.push(value ?? 0);
  if (c.past.length > KEPT) c.past.shift();
  const top = Math.max(...c.past, 1e-9), step = 100 / Math.max(c.past.length - 1, 1);
  const points = c.past.map((v, i) => `${(i * step).toFixed(2)},${(46 - (44 * v) / top).toFixed(2)}`).join(" ");
  c.svg.querySelector("polyline").setAttribute("points", points);
  c.svg.querySelector("polygon").setAttribute("points", `0,48 ${points} 100,48`);
}

function table(id, rows) {
  const shown = rows.length ? rows : [["nothing yet", ""]];
  $(id).querySelector("tbody").replaceChildren(
    ...shown.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value))));
}

function tables(s) {
  const of = (name) => s.series.get(name) ?? [];
  const kinds = new Map();
  const named = ({ model }, what) => (model ? `${model}, ${what}` : what);
  for (const { labels, value } of of("hybrid_blocks")) {
    const kind = named(labels, labels.kind);
    kinds.set(kind, { ...kinds.get(kind), [labels.state]: value });
  }
  table("blocks", [...kinds].map(([kind, b]) => [kind, Object.entries(b).map(([k, v]) => `${v} ${k}`).join(", ")]));
  table("outcomes", of("hybrid_requests_total").map((r) => [`${r.labels.endpoint}, ${r.labels.outcome}`, String(r.value)]));
  table("finished", of("hybrid_finished_total").map((r) => [named(r.labels, r.labels.reason), String(r.value)]));
}

async function look() {
  try {
    const now = parsed(await getText("/metrics"));
    for (const [title, unit, of] of CARDS) show(title, unit, before || !unit.includes("second") ? of(now) : 0);
    tables(now);
    before = now;
    const state = await readiness();
    $("state").textContent = state;
    $("state").classList.toggle("good", state === "ready");
    if (state === "ready") {
      const loaded = (await getJson("/v1/models")).data.filter((model) => model.loaded);
      $("what").textContent = loaded.map(({ id, device }) => `${id} on ${device}`).join(", ");
    }
    $("status").textContent = "";
  } catch (error) {
    $("state").textContent = "no answer";
    $("state").classList.remove("good");
    $("status").textContent = error.status === 401 ? "This server asks for an API key." : error.message;
  }
}

keyField(look);
look();
setInterval(look, EVERY);
