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

/** Returns what the browser keeps of an earlier visit, or null. Browsers may forbid pages to keep anything. */
export function kept(area, name) {
  try {
    return window[area].getItem(name);
  } catch {
    return null;
  }
}

/** Lets the browser keep a text for later, or forget it if it is empty. */
export function keep(area, name, text) {
  try {
    if (text) window[area].setItem(name, text);
    else window[area].removeItem(name);
  } catch {
    // The page works without it until it is closed.
  }
}

/** Returns what tells a row or a card from the others of its list, whatever it shows. */
function keyOf(node) {
  return node.dataset?.request ?? node.dataset?.member;
}

/**
 * Makes the content of `place` equal to `made`. What is there already is changed in place and not replaced, so it keeps
 * its focus, its selection, a press of the mouse that has begun, and what a person has scrolled or unfolded. Rows and
 * cards keep their handlers, which must depend on nothing but their key.
 */
export function renew(place, made) {
  const wanted = new Set(made.map(keyOf));
  for (const each of [...place.childNodes]) if (keyOf(each) && !wanted.has(keyOf(each))) each.remove();
  const keyToOld = new Map([...place.childNodes].map((each) => [keyOf(each), each]));
  let at = place.firstChild;
  const removeHere = () => {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  };
  for (const next of made) {
    const key = keyOf(next);
    while (key && at && !keyOf(at)) removeHere();
    const isSameKind = at && !keyOf(at) && at.nodeName === next.nodeName;
    const old = key ? keyToOld.get(key) : isSameKind ? at : undefined;
    if (old && old === at) at = at.nextSibling;
    else place.insertBefore(old ?? next, at);
    if (old) become(old, next);
  }
  while (at) removeHere();
}

/** Gives an old node what a new one of its kind has. Only a person folds and unfolds what is in the page. */
function become(old, next) {
  if (!(old instanceof Element)) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  const isOwn = ({ name }) => name !== "style" && name !== "open";
  for (const { name } of [...old.attributes].filter(isOwn)) if (!next.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of [...next.attributes].filter(isOwn))
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  // The page's policy forbids the attribute, but not the property.
  if (old.style.cssText !== next.style.cssText) old.style.cssText = next.style.cssText;
  renew(old, [...next.childNodes]);
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
    element(
      "tr",
      isBest(row) ? { class: "best", "aria-current": "true" } : {},
      ...columns.map((c) => cell("td", c, c.show(row))),
    ),
  );
  const made = element("table", {}, caption ? element("caption", { class: "hidden", text: caption }) : null);
  made.append(element("thead", {}, head), element("tbody", {}, ...body));
  if (footer) made.append(element("tfoot", {}, footer));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, made);
}
