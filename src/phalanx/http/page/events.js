// Events: the last faults in plain words: what failed, why, what phalanx did, what helps.

import { $, clock, commands, fill, h } from "./dom.js";
import { below } from "./overview.js";

export function draw() {
  const found = [...below("events").sort((a, b) => Number(b[0]) - Number(a[0])), ...below("moves")].sort((a, b) => b[1].at - a[1].at);
  const title = h("h2", { class: "unseen", text: "Events" });
  if (!found.length) return fill($("view-events"), title, h("p", { class: "empty", text: "Nothing has failed since this process began." }));
  fill($("view-events"), title, h("ol", { class: "events" }, found.map(([, event]) => h("li", { class: event.is_good ? "card good" : "card" },
    h("time", { text: clock(event.at) }),
    h("div", {},
      h("h3", { text: event.what }),
      event.cause ? h("p", { text: event.cause }) : null,
      h("p", { class: "did", text: event.did }),
      event.remedy ? h("p", { class: "remedy" }, commands(event.remedy)) : null)))));
}
