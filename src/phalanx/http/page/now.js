// Now: the server or gateway, its hosts, links and replicas, from the overview's parts.

import { $, bar, bytes, cell, commands, fill, h, number, plural, seconds, table } from "./dom.js";
import { below, parts } from "./overview.js";

const KINDS = [
  ["weights", "Weights"], ["rows", "Rows"], ["prefixes", "Kept prefixes"], ["other", "Other programs"], ["free", "Free"], ["guard", "Guard"],
];

export function draw() {
  const server = parts.get("server");
  if (!server) return fill($("view-now"), h("p", { class: "empty", text: "Nothing is known yet." }));
  fill($("view-now"),
    h("div", { class: "cards" }, summary(server)),
    replicas(below("replicas")),
    section("Hosts", below("hosts").map(([name, host]) => hostCard(name, host)), "hosts"),
    links(parts.get("links") ?? []),
    selfTest(parts.get("self_test") ?? []));
}

function section(title, content, kind) {
  return content.length ? h("section", { class: kind }, h("h2", { text: title }), content) : null;
}

function fact(label, value, more) {
  return value === undefined || value === null || value === "" ? null : h("div", { class: "fact" }, h("dt", { text: label }), h("dd", {}, String(value), more));
}

// What requests that ran alone took, and what a plan predicted; nothing of what is not known.
function beside(label, of, shown, { measured, predicted }) {
  const known = [[of(measured), (value) => `${value} measured`], [of(predicted), (value) => `${value} predicted`]];
  return fact(label, known.filter(([value]) => Number.isFinite(value)).map(([value, told]) => told(shown(value))).join(", "));
}

function summary(server) {
  if (server.kind === "gateway") {
    return h("dl", { class: "facts card" },
      fact("Gateway", `phalanx ${server.version}`), fact("State", server.phase), fact("Policy", server.policy),
      fact("Requests", `${number(server.running)} of ${number(server.limit)}`, bar(server.running / Math.max(1, server.limit), "share of places taken")),
      fact("Waiting", number(server.waiting)));
  }
  const shape = server.ranks > 1 ? `${server.ranks} ranks${server.stages > 1 ? `, ${server.stages} stages` : ""}${server.backend === "none" ? "" : `, ${server.backend}`}` : "1 rank";
  const bits = server.quantization === "none" ? server.dtype : server.quantization;
  const progress = server.progress;
  return h("dl", { class: "facts card" },
    fact("Model", server.models.join(", ")),
    fact("State", server.phase + (server.reason ? `: ${server.reason}` : "")),
    progress ? fact(`Loading: ${progress.phase}`, `${number((100 * progress.done) / Math.max(1, progress.total))} %`, bar(progress.done / Math.max(1, progress.total), "loaded")) : null,
    server.running === undefined ? null : fact("Rows", `${number(server.running)} of ${number(server.limit)}`, bar(server.running / server.limit, "share of rows taken")),
    fact("Waiting", server.waiting === undefined ? null : number(server.waiting)),
    beside("Tokens/s of a request", (speed) => speed?.tokens_per_second, (value) => number(value, 1), server),
    beside("First token after", (speed) => speed?.ttft_seconds, seconds, server),
    fact("Prompt tokens cached", server.prefix_hit_rate === undefined ? null : `${number(100 * server.prefix_hit_rate)} %`),
    fact("Group", server.ranks === undefined ? null : shape),
    fact("Family", server.model_type), fact("Weights", bits), fact("Context", server.context === undefined ? null : `${number(server.context)} tokens`),
    fact("Drafts", server.drafts?.split(", ").slice(0, 2).join(", ")), fact("Kernels", server.kernels),
    fact("Restarts", server.restarts || null), fact("phalanx", server.version));
}

function replicas(found) {
  if (!found.length) return null;
  const bad = (replica) => (replica.state === "up" && !replica.reason ? 1 : 0);
  const rows = found.sort((a, b) => bad(a[1]) - bad(b[1])).map(([name, replica]) => h("tr", {},
    cell(h("strong", { text: name })), cell(badge(replica.reason ? (replica.state === "up" ? "held back" : replica.state) : replica.state)),
    cell(h("span", { text: `${number(replica.in_flight)} of ${number(replica.limit)}${replica.others ? ` (+${replica.others})` : ""}` }), "n"),
    cell((replica.models ?? ["any model"]).join(", ")), cell(replica.can_migrate ? "go on elsewhere" : "end with it"), cell(replica.reason || "", "why")));
  return h("section", {}, h("h2", { text: "Replicas" }),
    table("Replicas", ["Replica", "State", { n: "Requests" }, "Models", "Its streams", "Why"], rows));
}

export function badge(state) {
  const kinds = { up: "good", good: "good", ready: "good", decode: "good", finished: "calm", prefill: "busy", queued: "calm", paused: "warn", draining: "warn", "held back": "warn", "client left": "warn", starting: "busy", loading: "busy" };
  return h("span", { class: `badge ${kinds[state] ?? "bad"}`, text: state });
}

function hostCard(name, host) {
  const wrong = host.ranks.reduce((n, rank) => n + rank.mismatches, 0);
  const stages = host.ranks.some((rank) => rank.layers);
  const checked = host.ranks.some((rank) => rank.checked_sums);
  const head = ["Rank", ...(stages ? ["Layers"] : []), { n: "Memory active" }, { n: "Resident" }, ...(checked ? [{ n: "Sums verified" }] : []), { n: "Process" }];
  const rows = host.ranks.map((rank) => h("tr", {},
    cell(String(rank.rank)), stages ? cell(rank.layers ? `${rank.layers[0]} to ${rank.layers[1]} (stage ${rank.stage})` : "–") : null,
    cell(bytes(rank.active), "n"), cell(bytes(rank.resident), "n"), checked ? cell(number(rank.checked_sums), "n") : null, cell(String(rank.pid), "n")));
  return h("article", { class: "card" },
    h("h3", { text: name }), wrong ? h("p", { class: "wrong", text: `${number(wrong)} steps in which its rows differed from the plan` }) : null,
    host.memory ? memory(host.memory) : null, table(`Ranks of ${name}`, head, rows));
}

function memory(found) {
  const used = found.weights + found.rows + found.prefixes;
  const guard = Math.min(found.guard, found.available);
  const amounts = { ...found, other: Math.max(0, found.total - found.available - used), guard, free: Math.max(0, found.available - guard) };
  const sum = KINDS.reduce((n, [kind]) => n + amounts[kind], 0);
  const shown = KINDS.filter(([kind]) => amounts[kind] > 0);
  const spans = shown.map(([kind]) => {
    const span = h("span", { class: `m-${kind}` });
    span.style.flexGrow = String(amounts[kind] / sum);
    return span;
  });
  const words = shown.map(([kind, label]) => `${label} ${bytes(amounts[kind])}`).join(", ");
  return h("div", { class: "memory" },
    h("div", { class: "stack", role: "img", "aria-label": `Memory of ${bytes(found.total)}: ${words}` }, spans),
    h("ul", { class: "legend" }, shown.map(([kind, label]) => h("li", {}, h("span", { class: `key m-${kind}` }), h("span", { text: label }),
      h("b", { text: kind === "rows" ? `${bytes(amounts.rows)} of ${bytes(found.rows_budget)}` : kind === "prefixes" ? `${bytes(amounts.prefixes)} of ${bytes(found.prefixes_budget)}` : bytes(amounts[kind]) }))),
      Number.isFinite(found.disk_blocks) ? h("li", {}, h("span", { text: "Kept prefixes on disk" }), h("b", { text: plural(found.disk_blocks, "block") })) : null));
}

const micros = (value) => (value >= 1000 ? `${number(value / 1000, 2)} ms` : `${number(value)} µs`);
const gigabytes = (value) => (value >= 0.01 ? `${number(value, 2)} GB/s` : "");
const LINK_COLUMNS = [
  ["latency_us", "Time", micros], ["gb_per_s", "Bandwidth", gigabytes], ["messages", "Messages", (value) => number(value)], ["bytes", "Received", bytes],
  ["waited_seconds", "Waited", seconds], ["resent", "Sent again", (value, link) => `${number(value)} of ${number(link.segments)}`], ["faults", "Faults", (value) => number(value)],
];

function links(found) {
  if (!found.length) return null;
  const columns = LINK_COLUMNS.filter(([key]) => found.some((link) => Number.isFinite(link[key])));
  const rows = found.map((link) => h("tr", {},
    cell(h("strong", { text: link.name })), cell(link.carries), cell(badge(link.problem ? "faulty" : "good")),
    columns.map(([key, , shown]) => cell(Number.isFinite(link[key]) ? shown(link[key], link) : "–", "n"))));
  const bad = found.filter((link) => link.problem).map((link) => h("li", { class: "card" }, h("div", {},
    h("h3", { text: link.problem }), link.remedy ? h("p", { class: "remedy" }, commands(link.remedy)) : null)));
  return h("section", { class: "links" }, h("h2", { text: "Links" }), bad.length ? h("ol", { class: "events" }, bad) : null,
    table("Links", ["Between", "Carries", "State", ...columns.map(([, label]) => ({ n: label }))], rows),
    h("p", { class: "hint", text: "Time is a connection's least round trip of the last minutes; of all-reduces, time and bandwidth are the self-test's. Waited is time that steps stood still for frames, also while the stage before computed. Figures that no rank measures are left out." }));
}

function selfTest(found) {
  if (!found.length) return null;
  const rows = found.map((one) => h("tr", {}, cell(one.name), cell(micros(one.latency_us), "n"), cell(Number.isFinite(one.gb_per_s) ? gigabytes(one.gb_per_s) : "", "n")));
  return h("section", {}, h("h2", { text: "Self-test" }),
    h("p", { class: "hint", text: "As the ranks measured it at the last start. phalanx net test measures every link." }),
    table("Self-test", ["What", { n: "Time" }, { n: "Bandwidth" }], rows));
}
