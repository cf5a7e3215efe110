// The page's begin: views by the address's fragment, the key, the stream of the overview.

import { key } from "./api.js";
import * as chat from "./chat.js";
import { $, number } from "./dom.js";
import * as eventsView from "./events.js";
import * as now from "./now.js";
import { parts, watch } from "./overview.js";
import * as requests from "./requests.js";

const VIEWS = { try: null, now, requests, events: eventsView };

function view() {
  const name = location.hash.slice(1);
  return name in VIEWS ? name : "try";
}

function draw() {
  const server = parts.get("server");
  const n = requests.running();
  $("running").hidden = !n;
  $("running").textContent = number(n);
  if (server) {
    const name = server.kind === "gateway" ? "gateway" : server.models[0];
    const is_well = server.phase === "ready";
    $("dot").className = `dot ${is_well ? "good" : "bad"}`;
    const said = is_well ? name : `${name}: ${server.phase}`;
    if ($("state").textContent !== said) $("state").textContent = said;
    document.title = `${name} · phalanx`;
  }
  VIEWS[view()]?.draw();
}

function show() {
  const chosen = view();
  for (const name of Object.keys(VIEWS)) $(`view-${name}`).hidden = name !== chosen;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${chosen}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  draw();
}

// Ask for a key. Resolves with whether one is given, else the question is dismissed.
function askForKey(said) {
  const dialog = $("key-dialog");
  $("key-wrong").textContent = key.get() && said ? said : "";
  $("key").value = "";
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  $("key").focus();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "use"), { once: true }));
}

$("key-form").addEventListener("submit", () => { key.set($("key").value.trim()); });
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("life-close").addEventListener("click", () => $("life").close());
$("change-key").addEventListener("click", async () => {
  if (await askForKey("")) location.reload();
});
addEventListener("hashchange", show);

chat.start();
show();
let listed = "";
watch({
  changed() {
    const server = parts.get("server");
    const models = JSON.stringify([server?.phase, server?.models, [...parts.keys()].filter((name) => name.startsWith("replicas/"))]);
    if (models !== listed) { listed = models; chat.listModels(); }
    draw();
  },
  lost(said) {
    $("dot").className = "dot bad";
    $("state").textContent = said;
    listed = "";
  },
  async refused(said) {
    $("dot").className = "dot bad";
    $("state").textContent = "a key is needed";
    if (!(await askForKey(said))) await new Promise(() => {}); // until the button Key loads the page again
  },
});
if (view() === "try") chat.focusQuestion();
