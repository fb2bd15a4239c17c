// The list of the latest requests, each as a bar over the time at which it ran, with the record of the chosen one beside
// it.

import { byId, element, milliseconds, renew } from "./elements.js";
import { showRecord } from "./record.js";
import { read, readWithHeaders, save } from "./server.js";

const MAX_SHOWN = 60;
/** A record is read this many times after its request has ended, because answers of members may still come. */
const READS_AFTER_END = 3;
const NONE_CHOSEN = "Choose a request to see where its time went.";
/** The list is one stop of the Tab key, at `focused`; the arrow keys move in it. */
const state = { chosen: null, focused: null, readsLeft: 0, numAsked: 0, refused: () => {} };

export function startRequests(refused) {
  state.refused = refused;
  byId("kind").onchange = () => refreshRequests().catch(refused);
  byId("span").onchange = () => refreshRequests().catch(refused);
  byId("export-minute").onclick = () =>
    save("weft/spans?seconds=60&limit=1000", "weft-minute.perfetto.json").catch(refused);
  byId("request-list").onkeydown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const rows = [...byId("request-list").querySelectorAll("button")];
    const at = rows.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    rows[Math.max(0, Math.min(rows.length - 1, at + step))].focus();
  };
  byId("request-list").addEventListener("focusin", (event) => {
    state.focused = event.target.dataset.request;
    for (const each of byId("request-list").querySelectorAll("button")) each.tabIndex = each === event.target ? 0 : -1;
  });
}

/** Says whether the list is to be read again. One that was never read is read in any case. */
export function isLive() {
  return byId("live").checked || !byId("request-list").hasChildNodes();
}

export async function refreshRequests() {
  const kind = byId("kind").value;
  state.numAsked += 1;
  const number = state.numAsked;
  const { content, headers } = await readWithHeaders(
    `weft/requests?format=json&limit=${MAX_SHOWN}${kind ? `&modality=${kind}` : ""}`,
  );
  if (number !== state.numAsked) return; // What was asked later may be of another kind.
  show(content.requests, content.routers_without_answer, serverNow(headers.get("date")));
  await refreshChosen();
}

/** Forgets what was shown: it was for another key. */
export function clearRequests() {
  state.chosen = null;
  state.numAsked += 1;
  byId("request-list").replaceChildren();
  byId("chosen").replaceChildren(element("p", { class: "hint", text: NONE_CHOSEN }));
  delete byId("chosen").dataset.request;
}

/** Returns the server's time. Its header has whole seconds, so clocks that differ by less count as equal. */
function serverNow(date) {
  const own = Date.now() / 1000;
  const skew = date ? Date.parse(date) / 1000 - own : 0;
  return Math.abs(skew) < 2 ? own : own + skew;
}

function show(requests, silent, now) {
  const span = Number(byId("span").value);
  const inSpan = requests.filter((each) => ended(each, now) >= now - span);
  const stop = inSpan.find((each) => each.request_id === state.focused) ?? inSpan[0];
  const rows = inSpan.map((each) => row(each, now, span, each === stop));
  const scale = element(
    "div",
    { class: "axis", "aria-hidden": "true" },
    element("span"),
    element("span"),
    element("span", { class: "scale" }, element("span", { text: `${span} s ago` }), element("span", { text: "now" })),
    element("span"),
  );
  const key = element(
    "p",
    { class: "key-line row wrap" },
    ...[
      ["#e9a23b", "until the first token"],
      ["#2a9d8f", "generation"],
      ["#d1495b", "failed"],
    ].map(([background, text]) =>
      element("span", {}, element("span", { class: "swatch", style: { background } }), text),
    ),
  );
  const none = rows.length
    ? null
    : element("p", {
        class: "hint",
        text: requests.length ? "No request ran in this span." : "No such request has come yet.",
      });
  const warning = silent.length
    ? element("p", { class: "error", text: `These routers have not answered: ${silent.join(", ")}` })
    : null;
  const more =
    rows.length === MAX_SHOWN
      ? element("p", { class: "hint", text: `The list ends after ${MAX_SHOWN} requests.` })
      : null;
  const above = rows.length ? [warning, key, scale] : [warning];
  renew(byId("request-list"), [...above, ...rows, none, more].filter(Boolean));
}

function ended(each, now) {
  return each.total_s === null ? now : each.received_at + each.total_s;
}

function row(each, now, span, isStop) {
  const isRunning = each.outcome === "running";
  const isBad = !isRunning && each.outcome !== "ok" && each.outcome !== "tokenized";
  const begin = now - span;
  const end = isRunning ? now : ended(each, now);
  const firstAt = each.first_token_s === null ? end : Math.min(end, each.received_at + each.first_token_s);
  const at = (moment) => Math.max(0, Math.min(100, ((moment - begin) / span) * 100));
  const bar = (name, from, to) =>
    element("i", {
      class: `${name}${isRunning ? " running" : ""}`,
      style: { left: `${at(from)}%`, width: `${Math.max(0, at(to) - at(from))}%` },
    });
  const lane = element("span", { class: "lane", "aria-hidden": "true" });
  if (isBad) lane.append(bar("failed", each.received_at, end));
  else lane.append(bar("first", each.received_at, firstAt), firstAt < end ? bar("rest", firstAt, end) : "");
  const took = isRunning ? each.stage : isBad ? each.outcome : milliseconds(each.total_s);
  const time = new Date(each.received_at * 1000).toLocaleTimeString([], { hour12: false });
  const told = `${each.modality} request at ${time}: ${isRunning ? `running, ${each.stage}` : `${each.outcome}, first token ${milliseconds(each.first_token_s) || "none"}, total ${milliseconds(each.total_s)}`}`;
  const choose = () => chooseRequest(each.request_id).catch(state.refused);
  return element(
    "button",
    {
      class: "request",
      "data-request": each.request_id,
      tabindex: isStop ? "0" : "-1",
      "aria-current": each.request_id === state.chosen ? "true" : undefined,
      "aria-label": told,
      title: told,
      onclick: choose,
    },
    element("span", { class: "dim", text: time }),
    element("span", { text: each.modality }),
    lane,
    element("span", { class: `took${isBad ? " outcome-bad" : ""}`, text: took }),
  );
}

async function chooseRequest(id) {
  state.chosen = id;
  state.readsLeft = READS_AFTER_END;
  for (const each of byId("request-list").querySelectorAll("button")) {
    if (each.dataset.request === id) each.setAttribute("aria-current", "true");
    else each.removeAttribute("aria-current");
  }
  await refreshChosen();
  const place = byId("chosen");
  if (place.getBoundingClientRect().top > innerHeight - 100) place.scrollIntoView(); // On a phone, it is below the list.
}

/** Shows the chosen request, again and again until its record is complete. */
async function refreshChosen() {
  if (!state.chosen || state.readsLeft === 0) return;
  const id = state.chosen;
  try {
    const record = await read(`weft/requests/${encodeURIComponent(id)}?format=json`);
    if (id !== state.chosen) return;
    state.readsLeft = record.outcome === "running" ? READS_AFTER_END : state.readsLeft - 1;
    showRecord(byId("chosen"), record);
  } catch (error) {
    if (id !== state.chosen) return;
    if (error.status !== 404) throw error; // It may be read when the server is there again.
    state.readsLeft = 0;
    byId("chosen").replaceChildren(element("p", { class: "error", role: "alert", text: error.message }));
    delete byId("chosen").dataset.request;
  }
}
