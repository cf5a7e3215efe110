// Requests: those that run and the last others; a click shows the life of one.

import { ask, reason } from "./api.js";
import { $, bar, cell, fill, h, number, seconds, table } from "./dom.js";
import { badge } from "./now.js";
import { below, parts } from "./overview.js";

const OVER = new Set(["finished", "failed", "client left"]);

export function running() {
  return below("requests").filter(([, row]) => !OVER.has(row.state)).length;
}

export function draw() {
  const gateway = parts.get("server")?.kind === "gateway";
  const rows = below("requests").sort((a, b) => b[1].number - a[1].number).map(([name, row]) => (gateway ? gatewayRow(row) : serverRow(name, row)));
  const focused = document.activeElement?.dataset?.life;
  const title = h("h2", { class: "unseen", text: "Requests" });
  if (!rows.length) return fill($("view-requests"), title, h("p", { class: "empty", text: "No request has come yet. With an API key, its own requests are shown; with the admin key, all." }));
  const head = gateway
    ? ["Request", "State", "Model", "Replica", { n: "First text" }, { n: "Tokens" }, { n: "Moved" }, { n: "Time" }]
    : ["Request", "State", "Model", { n: "Prompt" }, { n: "Cached" }, { n: "Output" }, { n: "Tokens/s" }, { n: "Drafts" }, { n: "Moved, paused" }, { n: "Time" }];
  const scrolled = $("view-requests").querySelector(".scroll")?.scrollLeft ?? 0;
  fill($("view-requests"), title, table("Newest first", head, rows));
  const region = $("view-requests").querySelector(".scroll");
  if (scrolled) region.scrollLeft = scrolled;
  if (focused) [...region.querySelectorAll("button.link")].find((one) => one.dataset.life === focused)?.focus({ preventScroll: true });
}

const short = (id) => (id.length > 22 ? `${id.slice(0, 12)}…${id.slice(-6)}` : id);

function opener(id) {
  return h("button", { type: "button", class: "link mono", "data-life": id, title: id, text: short(id) });
}

addEventListener("click", (event) => {
  const id = event.target instanceof Element ? event.target.closest("tr")?.querySelector("[data-life]")?.dataset.life : null;
  if (id) openLife(id);
});

function state(row) {
  if (row.state !== "prefill" || row.prefilled === undefined) return badge(row.state);
  return h("span", { class: "with-bar" }, badge("prefill"), bar(row.prefilled, `${number(100 * row.prefilled)} % of the prompt is computed`));
}

const cached = (row) => number(row.cached_tokens) + (row.disk_tokens ? ` (${number(row.disk_tokens)} from disk)` : "");

function serverRow(id, row) {
  const drafts = row.drafted_tokens ? `${number((100 * row.accepted_tokens) / row.drafted_tokens)} %` : "–";
  const moved = [row.moves, row.pauses].some(Boolean) ? `${row.moves}, ${row.pauses}` : "–";
  return h("tr", { class: "opens" }, cell(opener(id)), cell(state(row)), cell(row.model), cell(number(row.prompt_tokens), "n"), cell(cached(row), "n"),
    cell(number(row.output_tokens), "n"), cell(row.tokens_per_second === undefined ? "–" : number(row.tokens_per_second, 1), "n"), cell(drafts, "n"), cell(moved, "n"), cell(seconds(row.seconds), "n"));
}

function gatewayRow(row) {
  return h("tr", { class: "opens" }, cell(opener(row.id)), cell(state(row)), cell(row.model || "any"), cell(row.replica ?? "–"),
    cell(row.first_text_seconds === null ? "–" : seconds(row.first_text_seconds), "n"), cell(row.total_tokens === null ? "–" : number(row.total_tokens), "n"),
    cell(row.moves ? number(row.moves) : "–", "n"), cell(seconds(row.seconds), "n"));
}

export async function openLife(id) {
  const dialog = $("life");
  $("life-body").replaceChildren(h("p", { class: "empty", text: "Asking …" }));
  $("life-title").textContent = short(id);
  if (!dialog.open) dialog.showModal();
  try {
    const answer = await ask(`v1/requests/${encodeURIComponent(id)}`);
    if (!answer.ok) throw new Error(await reason(answer));
    show(await answer.json());
  } catch (error) {
    $("life-body").replaceChildren(h("p", { class: "wrong", text: error.message }));
  }
}

function show(life) {
  const story = (Array.isArray(life.story) ? life.story : []).map((line) => h("li", { text: String(line) }));
  const facts = [["State", life.state], ["Model", life.model], ["Endpoint", life.endpoint], ["Time", seconds(life.seconds?.total)],
    ["First token", life.seconds?.first_token === undefined ? null : seconds(life.seconds.first_token)], ["Id", life.id], ["x-request-id", life.request_id === life.id ? null : life.request_id]];
  fill($("life-body"),
    h("dl", { class: "facts" }, facts.filter(([, value]) => value).map(([label, value]) => h("div", { class: "fact" }, h("dt", { text: label }), h("dd", { text: String(value) })))),
    timeline(life.seconds ?? {}), h("ol", { class: "story" }, story),
    h("details", {}, h("summary", { text: "As JSON" }), h("pre", { tabindex: "0", text: JSON.stringify(life, null, 1) })));
}

function timeline(times) {
  const known = [["queue", "Queue"], ["prefill", "Prefill"], ["decode", "Decode"]].filter(([name]) => times[name] > 0);
  const sum = known.reduce((n, [name]) => n + times[name], 0);
  if (!sum) return null;
  const spans = known.map(([name]) => { const span = h("span", { class: `t-${name}` }); span.style.flexGrow = String(times[name] / sum); return span; });
  return h("div", { class: "memory" },
    h("div", { class: "stack", role: "img", "aria-label": known.map(([name, label]) => `${label} ${seconds(times[name])}`).join(", ") }, spans),
    h("ul", { class: "legend" }, known.map(([name, label]) => h("li", {}, h("span", { class: `key t-${name}` }), h("span", { text: label }), h("b", { text: seconds(times[name]) })))));
}
