// Builds elements and formats numbers. Text always becomes a text node: nothing here or elsewhere on the page parses
// markup, so that no name, prompt, answer or log line can be any.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const $ = (id) => document.getElementById(id);

// Replace an element's children, unless they would be the same: a reader's selection and focus stay.
export function fill(element, ...children) {
  const fresh = document.createElement("div");
  fresh.append(...children.flat().filter(Boolean));
  const same = fresh.childNodes.length === element.childNodes.length &&
    [...fresh.childNodes].every((node, i) => node.isEqualNode(element.childNodes[i]));
  if (!same) element.replaceChildren(...fresh.childNodes);
}

export const number = (value, digits = 0) =>
  Number.isFinite(value) ? value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits }) : "–";

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 2 ** 30) return `${number(value / 2 ** 30, value >= 100 * 2 ** 30 ? 0 : 1)} GiB`;
  if (value < 2 ** 20) return `${number(value / 2 ** 10)} KiB`;
  return `${number(value / 2 ** 20, value >= 10 * 2 ** 20 ? 0 : 1)} MiB`;
}

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 10) return `${number(value, value < 1 ? 2 : 1)} s`;
  if (value < 120) return `${number(value)} s`;
  return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
}

export const clock = (at) => (Number.isFinite(at) ? new Date(at * 1000).toLocaleTimeString("en-GB") : "–");

export const plural = (n, what) => `${number(n)} ${what}${n === 1 ? "" : "s"}`;

// Words in backticks are commands.
export const commands = (text) => text.split("`").map((piece, i) => (i % 2 ? h("code", { text: piece }) : document.createTextNode(piece)));

export function bar(share, label) {
  const inner = h("span");
  inner.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return h("span", { class: "bar", role: "img", "aria-label": label }, inner);
}

export function table(caption, head, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("thead", {}, h("tr", {}, head.map((one) => h("th", { scope: "col", class: one.n ? "n" : null, text: one.n ?? one })))),
      h("tbody", {}, rows)));
}

export function cell(content, kind) {
  return h("td", { class: kind }, content instanceof Node ? content : String(content ?? "–"));
}
