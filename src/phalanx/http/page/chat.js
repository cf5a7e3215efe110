// Try: a conversation with the model. It is kept in this browser only.

import { Refused, ask, events, key, reason } from "./api.js";
import { $, fill, h, number, plural, seconds } from "./dom.js";
import { copied, render } from "./markdown.js";
import { openLife } from "./requests.js";

const KEPT = "phalanx.conversation";
const DRAW_MS = 60; // between two drawings of an answer that comes
const DRAW_SHARE = 10; // times a drawing's own time
const MAX_KEPT = 200; // messages
const MAX_TOLD = 2000; // characters of an answer that screen readers say by themselves; the conversation has the rest

let messages = []; // {role, content, reasoning?, note?, id?, failed?}
let running = null; // AbortController of the answer that comes
let ui = {};

export function start() {
  ui = {
    log: h("div", { class: "log", role: "log", "aria-label": "Conversation", "aria-live": "off", tabindex: "0" }), // `tell` says an answer once
    text: h("textarea", { id: "question", rows: "2", placeholder: "Ask the model something", onkeydown: onKey, oninput: grow }),
    send: h("button", { type: "submit", class: "primary", text: "Send" }),
    stop: h("button", { type: "button", class: "stop", hidden: true, onclick: () => running?.abort(), text: "Stop" }),
    retry: h("button", { type: "button", class: "quiet", onclick: retry, text: "Retry" }),
    fresh: h("button", { type: "button", class: "quiet", onclick: forget, text: "New conversation" }),
    model: h("select", { id: "model" }),
    temperature: h("input", { id: "temperature", type: "number", min: "0", max: "2", step: "0.1", placeholder: "the model's" }),
    limit: h("input", { id: "limit", type: "number", min: "1", step: "1", placeholder: "no limit" }),
    system: h("textarea", { id: "system", rows: "3", placeholder: "None" }),
  };
  const field = (id, label, input) => h("div", { class: "field" }, h("label", { for: id, text: label }), input);
  const settings = h("details", { class: "settings", open: innerWidth > 900 },
    h("summary", { text: "Settings" }),
    field("model", "Model", ui.model),
    field("temperature", "Temperature", ui.temperature),
    field("limit", "Tokens at most", ui.limit),
    field("system", "System prompt", ui.system),
    h("div", { class: "actions column" },
      h("button", { type: "button", class: "quiet", onclick: (event) => copied(event.currentTarget, asCurl()), text: "Copy as curl" }),
      h("button", { type: "button", class: "quiet", onclick: (event) => copied(event.currentTarget, asPython()), text: "Copy as Python" })));
  const form = h("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); send(); } },
    h("label", { for: "question", class: "unseen", text: "Message" }), ui.text,
    h("div", { class: "actions" }, ui.fresh, ui.retry, h("span", { class: "grow" }), ui.stop, ui.send));
  $("view-try").append(h("h2", { class: "unseen", text: "Try" }), h("div", { class: "try" }, h("div", { class: "talk" }, ui.log, form), settings));
  try { messages = JSON.parse(localStorage.getItem(KEPT) ?? "[]"); } catch { messages = []; }
  messages = Array.isArray(messages) ? messages.filter((one) => typeof one?.content === "string") : [];
  draw();
}

export async function listModels() {
  try {
    const answer = await ask("v1/models");
    if (!answer.ok) return;
    const chosen = ui.model.value;
    const names = (await answer.json()).data.map((model) => String(model.id));
    fill(ui.model, names.map((name) => h("option", { value: name, text: name })));
    if (names.includes(chosen)) ui.model.value = chosen;
  } catch { /* the stream of the overview says what is wrong */ }
}

export const focusQuestion = () => ui.text.focus({ preventScroll: true });

function onKey(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
}

function grow() {
  ui.text.style.height = "auto";
  ui.text.style.height = `${Math.min(ui.text.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function send() {
  const content = ui.text.value.trim();
  if (!content || running) return;
  ui.text.value = "";
  grow();
  messages.push({ role: "user", content });
  answer();
}

function retry() {
  if (running) return;
  while (messages.length && messages.at(-1).role !== "user") messages.pop();
  if (messages.length) answer();
}

function forget() {
  running?.abort();
  messages = [];
  keep();
  draw();
  ui.text.focus();
}

function keep() {
  try { localStorage.setItem(KEPT, JSON.stringify(messages.slice(-MAX_KEPT))); } catch { /* full or forbidden */ }
}

function body() {
  const system = ui.system.value.trim();
  const said = messages.filter((one) => !one.failed && one.content).map(({ role, content }) => ({ role, content }));
  const asked = { model: ui.model.value || undefined, messages: [...(system ? [{ role: "system", content: system }] : []), ...said] };
  if (ui.temperature.value !== "") asked.temperature = Number(ui.temperature.value);
  if (ui.limit.value !== "") asked.max_tokens = Number(ui.limit.value);
  return asked;
}

async function answer() {
  running = new AbortController();
  const mine = running;
  const asked = { ...body(), stream: true, stream_options: { include_usage: true } };
  const said = { role: "assistant", content: "", reasoning: "" };
  messages.push(said);
  draw();
  scrollDown();
  const begun = performance.now();
  let first = null;
  let usage = null;
  let drawn = 0;
  let cost = 0; // ms that the last drawing took: long answers take long, and are drawn less often
  try {
    const reply = await ask("v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked), signal: mine.signal,
    });
    said.id = reply.headers.get("x-request-id");
    if (!reply.ok) throw new Error(await reason(reply));
    for await (const { data } of events(reply)) {
      if (data === "[DONE]") break;
      const piece = JSON.parse(data);
      if (piece.error) throw new Error(String(piece.error.message ?? "the stream has failed"));
      usage = piece.usage ?? usage;
      const delta = piece.choices?.[0]?.delta ?? {};
      const text = delta.content ?? "";
      const thought = delta.reasoning_content ?? delta.reasoning ?? "";
      if (text || thought) first ??= performance.now();
      said.content += text;
      said.reasoning += thought;
      const now = performance.now();
      if (now - drawn > Math.max(DRAW_MS, DRAW_SHARE * cost)) { drawLast(); drawn = performance.now(); cost = drawn - now; }
    }
    said.note = told(usage, begun, first);
    tell(`The model says: ${said.content || "nothing"}`);
  } catch (error) {
    if (mine.signal.aborted) said.note = "Stopped.";
    else {
      said.note = error instanceof Refused ? `Refused: ${error.message}` : error.message || "The connection has broken.";
      said.failed = true;
    }
    tell(said.note);
  } finally {
    if (running === mine) running = null;
    keep();
    draw();
  }
}

// Have screen readers say it, once what they are saying is over.
function tell(text) { $("said").textContent = text.slice(0, MAX_TOLD); }

function told(usage, begun, first) {
  const end = performance.now();
  if (!usage) return "";
  const n = usage.completion_tokens;
  const rate = first && n > 1 && end > first ? `, ${number(((n - 1) * 1000) / (end - first), 1)} a second` : "";
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const wait = first ? `first after ${seconds((first - begun) / 1000)}` : "";
  return [plural(n, "token") + rate, wait, cached ? `${number(cached)} of ${number(usage.prompt_tokens)} prompt tokens cached` : ""]
    .filter(Boolean).join(" · ");
}

const names = { user: "You", assistant: "Model" };

function one(message) {
  const parts = [h("h3", { class: "who", text: names[message.role] ?? "System" })];
  if (message.reasoning) {
    parts.push(h("details", { class: "reasoning" }, h("summary", { text: "Reasoning" }), h("div", { class: "prose" }, render(message.reasoning))));
  }
  if (message.role === "assistant") parts.push(h("div", { class: "prose" }, render(message.content)));
  else parts.push(h("p", { class: "plain", text: message.content }));
  if (message.note) {
    const life = message.id ? h("button", { type: "button", class: "link", onclick: () => openLife(message.id), text: "Why so long?" }) : null;
    parts.push(h("p", { class: message.failed ? "note wrong" : "note" }, h("span", { text: message.note }), life));
  }
  return h("article", { class: `message ${message.role === "user" ? "user" : "model"}` }, parts);
}

function draw() {
  ui.log.replaceChildren(...messages.map(one));
  if (!messages.length) ui.log.append(h("p", { class: "empty", text: "Nothing is asked yet. What is typed here stays in this browser, and goes to this server only." }));
  if (running) ui.log.lastChild.classList.add("coming");
  const focused = document.activeElement;
  ui.send.hidden = Boolean(running);
  ui.stop.hidden = !running;
  if (focused === ui.send && running) ui.stop.focus();
  if (focused === ui.stop && !running) ui.send.focus();
  ui.retry.disabled = Boolean(running) || !messages.some((message) => message.role === "user");
  ui.fresh.disabled = !messages.length;
}

function drawLast() {
  const wasOpen = ui.log.lastChild?.querySelector("details")?.open;
  const atEnd = ui.log.scrollHeight - ui.log.scrollTop - ui.log.clientHeight < 60;
  const fresh = one(messages.at(-1));
  fresh.classList.add("coming");
  if (wasOpen) fresh.querySelector("details")?.setAttribute("open", "");
  ui.log.lastChild.replaceWith(fresh);
  if (atEnd) scrollDown();
}

function scrollDown() { ui.log.scrollTop = ui.log.scrollHeight; }

const address = () => new URL("v1/", document.baseURI).href;

function asCurl() {
  const quoted = JSON.stringify(body(), null, 1).replaceAll("'", "'\\''");
  const auth = key.get() ? ' -H "Authorization: Bearer $PHALANX_API_KEY"' : "";
  return `curl ${address()}chat/completions -H 'Content-Type: application/json'${auth} -d '${quoted}'\n`;
}

function asPython() {
  const { model, messages: said, ...more } = body();
  const options = Object.entries(more).map(([name, value]) => `, ${name}=${value}`).join("");
  const secret = key.get() ? 'os.environ["PHALANX_API_KEY"]' : '"none"';
  return `${key.get() ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(address())}, api_key=${secret})\n` +
    `answer = client.chat.completions.create(model=${JSON.stringify(model ?? "")}, messages=${JSON.stringify(said)}${options})\n` +
    "print(answer.choices[0].message.content)\n";
}
