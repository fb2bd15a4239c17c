// Makes elements of the page, and writes times, sizes and names as people read them. Texts of requests and answers only
// ever become text nodes, so no answer can become markup.

import { nameToWords, otherColour, spanToColour } from "./record_words.js";

/** Returns a new element. `fields` are attributes, except `text`, `style` (an object) and handlers such as `onclick`. */
export function element(tag, fields = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") made.textContent = value;
    else if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

export function words(name) {
  const bare = name.replace(/_s$/, "");
  const known = nameToWords[name] || nameToWords[bare];
  if (known) return known;
  const spaced = bare.replaceAll("_", " ");
  return spaced.charAt(0).toUpperCase() + spaced.slice(1);
}

export function colourOf(span) {
  return spanToColour[span] || otherColour;
}

/** Returns a time with about three digits, in milliseconds or, from ten seconds on, in seconds. */
export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (Math.abs(seconds) >= 10) return `${seconds.toFixed(1)} s`;
  const value = seconds * 1000;
  return `${value.toFixed(Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2)} ms`;
}

export function sizeOf(bytes) {
  if (bytes === null || bytes === undefined) return "";
  const power = bytes > 0 ? Math.min(4, Math.floor(Math.log2(bytes) / 10)) : 0;
  const value = bytes / 2 ** (10 * power);
  return `${power && value < 100 ? value.toFixed(1) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export function percent(share) {
  return share === null || share === undefined ? "" : `${Math.round(share * 100)} %`;
}

/** Returns the last part of a member's id, which tells it from others of its kind. */
export function shortName(memberId) {
  return memberId.length > 24 ? `${memberId.slice(0, 10)}…${memberId.slice(-10)}` : memberId;
}

/** Returns a table. A column is `{name, title, isNumber, show}`; `show(row)` gives text or an element. */
export function table(columns, rows, { caption, isBest = () => false, footer = null } = {}) {
  const cell = (tag, column, content) => {
    const made = element(tag, {
      class: column.isNumber ? "number" : undefined,
      scope: tag === "th" ? "col" : undefined,
    });
    made.append(content ?? "");
    return made;
  };
  const head = element("tr", {}, ...columns.map((column) => cell("th", column, column.title)));
  const body = rows.map((row) =>
    element("tr", { class: isBest(row) ? "best" : undefined }, ...columns.map((c) => cell("td", c, c.show(row)))),
  );
  const made = element("table", {}, caption ? element("caption", { class: "hidden", text: caption }) : null);
  made.append(element("thead", {}, head), element("tbody", {}, ...body));
  if (footer) made.append(element("tfoot", {}, footer));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, made);
}
