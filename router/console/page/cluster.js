// The picture of the cluster: routers, encoders and workers, what each does now, and the links between them.

import { byId, element, milliseconds, percent, renew, shortName, sizeOf } from "./elements.js";
import { read } from "./server.js";

/** A pool of more members shows them as small tiles, and no links. */
const MANY = 8;
const OLD_REPORT_S = 5;
const LINK_TO_WORDS = {
  same_process: "same process",
  nvlink: "NVLink",
  same_host: "same host",
  rdma: "RDMA",
  tcp: "TCP",
};
/** Holds the counters of the last picture, for rates. */
let before = { at: 0, done: new Map() };
let numCleared = 0;

export async function refreshCluster() {
  const number = numCleared;
  const picture = await read("weft/cluster");
  if (number !== numCleared) return;
  const now = performance.now() / 1000;
  const rates = ratesOf(picture, now);
  const routers = picture.routers.map((each) => routerCard(each, picture));
  const pools = [
    pool("Routers", routers),
    pool(
      "Encoders",
      picture.encoders.map((each) => encoderCard(each, rates)),
    ),
    pool(
      "Workers",
      picture.workers.map((each) => workerCard(each, rates)),
    ),
  ];
  const place = byId("picture");
  const isLarge = [picture.routers, picture.encoders, picture.workers].some((each) => each.length > MANY);
  place.classList.toggle("large", isLarge);
  place.querySelector(":scope > svg")?.remove();
  renew(place, pools);
  if (!isLarge) drawLinks(place, picture);
  const speed = picture.workers.reduce((sum, each) => sum + (rates.get(each.member_id) ?? 0), 0);
  const kinds = [...new Set(picture.links.map((each) => LINK_TO_WORDS[each.link] ?? each.link))];
  byId("totals").textContent = [
    `${picture.num_in_flight} in flight`,
    `${picture.num_waiting} waiting for room`,
    `${Math.round(speed)} tokens/s`,
    kinds.length ? `features over ${kinds.join(", ")}` : "",
  ]
    .filter(Boolean)
    .join(" · ");
}

/** Forgets what was shown: it was for another key. */
export function clearCluster() {
  numCleared += 1;
  before = { at: 0, done: new Map() };
  byId("picture").replaceChildren();
  byId("totals").textContent = "";
}

/** Returns what each member has done per second since the last picture. */
function ratesOf(picture, now) {
  const done = new Map([...picture.encoders, ...picture.workers].map((each) => [each.member_id, each.num_done]));
  const seconds = now - before.at;
  const rates = new Map();
  for (const [id, count] of done) {
    const earlier = before.done.get(id) ?? null; // A router that has just started knows no counters yet.
    if (earlier !== null && count !== null && seconds < 30) rates.set(id, Math.max(0, count - earlier) / seconds);
  }
  before = { at: now, done };
  return rates;
}

function pool(title, cards) {
  const troubled = cards.filter((each) => !each.classList.contains("there")).length;
  const note = troubled ? `, ${troubled} with trouble or leaving` : "";
  const heading = element("h3", { text: `${title} (${cards.length}${note})` });
  return element("section", { class: "pool", "aria-label": title }, heading, ...cards);
}

function card(member, pieces, state = "there") {
  const dot = { there: "good", excluded: "bad", leaving: "warn", silent: "bad" }[state];
  const name = element(
    "b",
    { title: member.member_id },
    element("span", { class: `dot ${dot}` }),
    shortName(member.member_id),
  );
  const said = {
    excluded: "left out for a while: it has failed",
    leaving: "is being stopped",
    silent: "no report comes",
  }[state];
  const trouble = said ? element("div", { class: "trouble", text: said }) : null;
  const pool = member.pool ? `pool ${member.pool} (${member.engine}), ` : "";
  const where = element("div", { class: "wordy", text: `${pool}host ${member.host}` });
  return element(
    "article",
    { class: `member ${state}`, "data-member": member.member_id, "aria-label": member.member_id },
    name,
    trouble,
    ...pieces,
    where,
  );
}

function routerCard(router, picture) {
  const isThis = router.member_id === picture.router_id;
  const load = isThis
    ? [
        element("div", { text: `${picture.num_in_flight} requests in flight, ${picture.num_waiting} waiting` }),
        element("div", { class: "wordy", text: "shows this picture" }),
      ]
    : [];
  return card(router, load);
}

function stateOf(member) {
  const isSilent = member.report_age_s === null || member.report_age_s > OLD_REPORT_S;
  return member.state === "there" && isSilent ? "silent" : member.state;
}

function encoderCard(encoder, rates) {
  const total = encoder.memory_size || 1;
  return card(
    encoder,
    [
      meter("Busy", [[encoder.busy]], percent(encoder.busy)),
      meter("Queue", [[Math.min(1, encoder.queue_s / 2)]], milliseconds(encoder.queue_s)),
      meter(
        "Arena",
        [[encoder.memory_used / total], [encoder.memory_cached / total, "pale"]],
        sizeOf(encoder.memory_used + encoder.memory_cached),
      ),
      element("div", {
        class: "wordy",
        text: `${encoder.modalities.join(", ")} · ${encoder.num_waiting ?? 0} queued · ${encoder.num_leases ?? 0} leases · ${rate(rates, encoder)} items/s · ${hits(encoder)} cached`,
      }),
    ],
    stateOf(encoder),
  );
}

function workerCard(worker, rates) {
  return card(
    worker,
    [
      meter("Running", [[Math.min(1, worker.num_active / 32)]], String(worker.num_active ?? "")),
      meter("Queue", [[Math.min(1, worker.queue_s / 2)]], milliseconds(worker.queue_s)),
      meter(
        "KV",
        [[worker.memory_used / (worker.memory_size || 1)]],
        percent(worker.memory_used / (worker.memory_size || 1)),
      ),
      element("div", {
        class: "wordy",
        text: `${worker.num_waiting ?? 0} waiting · ${worker.num_held ?? 0} held at the doorstep · ${rate(rates, worker)} tokens/s · ${hits(worker)} of prompts cached`,
      }),
    ],
    stateOf(worker),
  );
}

function rate(rates, member) {
  const value = rates.get(member.member_id);
  return value === undefined ? "…" : value >= 10 ? Math.round(value) : value.toFixed(1);
}

function hits(member) {
  return member.num_asked ? percent(member.num_hits / member.num_asked) : "nothing";
}

function meter(name, shares, value) {
  const bars = shares.map(([share, tone]) =>
    element("i", { class: tone, style: { width: `${Math.max(0, Math.min(1, share || 0)) * 100}%` } }),
  );
  return element(
    "div",
    { class: "meter" },
    element("span", { class: "dim", text: name }),
    element("span", { class: "tube", "aria-hidden": "true" }, ...bars),
    element("span", { class: "value", text: value }),
  );
}

function drawLinks(place, picture) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  const box = place.getBoundingClientRect();
  const cardOf = (id) => place.querySelector(`[data-member="${CSS.escape(id)}"]`)?.getBoundingClientRect();
  const draw = (from, to, kind, title) => {
    const [a, b] = [cardOf(from), cardOf(to)];
    if (!a || !b || a.right > b.left) return;
    const [x1, y1, x2, y2] = [
      a.right - box.left,
      a.top + a.height / 2 - box.top,
      b.left - box.left,
      b.top + b.height / 2 - box.top,
    ];
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const bend = (x2 - x1) / 2;
    path.setAttribute("d", `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`);
    path.setAttribute("class", `link ${kind}`);
    const label = document.createElementNS("http://www.w3.org/2000/svg", "title");
    label.textContent = title;
    path.append(label);
    svg.append(path);
  };
  for (const router of picture.routers) {
    for (const encoder of picture.encoders) draw(router.member_id, encoder.member_id, "call", "calls");
  }
  for (const { encoder_id: encoder, worker_id: worker, link } of picture.links)
    draw(encoder, worker, link, `features over ${LINK_TO_WORDS[link] ?? link}`);
  place.prepend(svg);
}
