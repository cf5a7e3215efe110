// Markdown as elements: headings, lists, code, tables, quotes, rules, emphasis, links. What it does not know stays text.
// It never parses markup: every piece of text becomes a text node, and a link leads to http or https only.

import { h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 8; // of lists and quotes inside each other
const MAX_LINE = 4000; // characters; a longer line, and a longer paragraph's text, is shown as it is

export function render(text, depth = 0) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const out = document.createDocumentFragment();
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [element, next] = block(lines, at, depth);
    out.append(element);
    at = next;
  }
  return out;
}

function block(lines, at, depth) {
  const line = lines[at];
  let found;
  if (line.length > MAX_LINE) return [h("p", { text: line }), at + 1];
  if ((found = FENCE.exec(line))) return code(lines, at, found);
  if ((found = HEADING.exec(line))) return [h(`h${Math.min(6, found[1].length + 2)}`, {}, inline(found[2])), at + 1];
  if (RULE.test(line)) return [h("hr"), at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_LINE.test(lines[at + 1])) return grid(lines, at);
  return paragraph(lines, at);
}

function code(lines, at, [, fence, language]) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(fence) && !lines[end].trim().replaceAll(fence[0], ""))) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const copy = h("button", { type: "button", class: "quiet copy", onclick: (event) => copied(event.currentTarget, text), text: "Copy" });
  const head = h("div", { class: "code-head" }, h("span", { text: language || "code" }), copy);
  return [h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, h("code", { text }))), end + 1];
}

function quote(lines, at, depth) {
  const inside = [];
  let found;
  for (; at < lines.length && (found = QUOTE.exec(lines[at])); at += 1) inside.push(found[1]);
  return [h("blockquote", {}, render(inside.join("\n"), depth + 1)), at];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const start = ordered ? parseInt(first[2], 10) : 1;
  const element = ordered ? h("ol", { start: start === 1 ? null : start }) : h("ul");
  let found;
  while (at < lines.length && (found = ITEM.exec(lines[at])) && found[1].length === indent && /\d/.test(found[2]) === ordered) {
    const inside = [found[3]];
    const deeper = indent + found[2].length + 1;
    at += 1;
    while (at < lines.length) {
      const margin = lines[at].length - lines[at].trimStart().length;
      if (!lines[at].trim()) {
        const after = lines[at + 1] ?? "";
        if (after.length - after.trimStart().length <= indent || !after.trim()) break;
      } else if (margin <= indent && (ITEM.test(lines[at]) || HEADING.test(lines[at]) || FENCE.test(lines[at]))) break;
      inside.push(lines[at].slice(Math.min(margin, deeper)));
      at += 1;
    }
    const content = render(inside.join("\n"), depth + 1);
    const only = content.childNodes.length === 1 ? content.firstChild : null;
    element.append(h("li", {}, only?.nodeName === "P" ? [...only.childNodes] : content));
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  return [element, at];
}

function grid(lines, at) {
  const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((one) => one.trim());
  const sides = cells(lines[at + 1]).map((one) => (one.endsWith(":") ? (one.startsWith(":") ? "center" : "right") : null));
  const row = (line, tag) => h("tr", {}, cells(line).slice(0, sides.length).map((one, i) =>
    h(tag, { class: sides[i], scope: tag === "th" ? "col" : null }, inline(one))));
  const head = row(lines[at], "th");
  const body = [];
  for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) body.push(row(lines[at], "td"));
  const element = h("table", {}, h("thead", {}, head), h("tbody", {}, body));
  return [h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, element), at];
}

function paragraph(lines, at) {
  const inside = [];
  for (; at < lines.length && lines[at].trim(); at += 1) {
    const line = lines[at];
    if (inside.length && (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line))) break;
    inside.push(line.trimStart());
  }
  const pieces = [];
  for (const line of inside) {
    if (pieces.length) pieces.push(document.createTextNode("\n"));
    pieces.push(...inline(line.replace(/ {2,}$/, "")));
    if (/ {2,}$/.test(line)) pieces.push(h("br"));
  }
  return [h("p", {}, pieces), at];
}

const SPAN = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)(?<=\S)\*\*|__(?=\S)(.+?)(?<=\S)__(?!\w)|\*(?=[^\s*])(.+?)(?<=[^\s*])\*|~~(?=\S)(.+?)(?<=\S)~~|\[([^\]]{1,500})\]\(([^\s()]{1,2000})\)|(https?:\/\/[^\s<>"'`)\]]{1,2000}[^\s<>"'`)\].,;:!?])/;

function inline(text, depth = 0) {
  const out = [];
  for (let rest = text; rest; ) {
    const found = depth < MAX_DEPTH && text.length <= MAX_LINE ? SPAN.exec(rest) : null;
    if (!found) { out.push(document.createTextNode(rest)); break; }
    if (found.index) out.push(document.createTextNode(rest.slice(0, found.index)));
    const [whole, , code, strong, strong2, em, gone, label, target, bare] = found;
    if (code !== undefined) out.push(h("code", { text: code.trim() || code }));
    else if (strong ?? strong2) out.push(h("strong", {}, inline(strong ?? strong2, depth + 1)));
    else if (em) out.push(h("em", {}, inline(em, depth + 1)));
    else if (gone) out.push(h("del", {}, inline(gone, depth + 1)));
    else out.push(link(label ?? bare, target ?? bare) ?? document.createTextNode(whole));
    rest = rest.slice(found.index + whole.length);
  }
  return out;
}

function link(label, target) {
  let url;
  try { url = new URL(target); } catch { return null; }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  return h("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank", text: label });
}

export async function copied(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}
