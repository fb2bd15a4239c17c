// Shows the record of one request: the parts of its time, the waterfall, the router's decision, and what was predicted.

import { colourOf, element, milliseconds, percent, renew, shortName, sizeOf, table, words } from "./elements.js";
import { save } from "./server.js";

const NO_TIME_S = 1e-6;
const MAX_SPANS = 300;
const PAIR_TERMS = [
  "ttft_s",
  "queue_s",
  "prefill_s",
  "held_s",
  "first_token_s",
  "delivery_s",
  "released_s",
  "covered_tokens",
  "num_prefill_tokens",
];
const ITEM_TERMS = [
  "is_cached",
  "wait_s",
  "decode_wait_s",
  "decode_s",
  "device_prepare_s",
  "encode_s",
  "transfer_s",
  "landing_s",
  "fetch_s",
  "cost",
  "num_bytes",
  "num_units",
];

/** Shows a record in `place`. `browserSeconds` is what the request took as the browser saw it. */
export function showRecord(place, record, { browserSeconds = null } = {}) {
  const isWhole = record.plans !== undefined;
  const pieces = [
    element("h2", { text: "Where the time went" }),
    headline(record),
    facts(record, browserSeconds),
    partsOf(record),
    isWhole
      ? waterfall(record)
      : element("p", {
          class: "dim",
          text: "An operator's key shows the waterfall and the router's decision too.",
        }),
    ...(record.plans ?? []).map((entry) => decision(entry)),
    isWhole ? stages(record) : null,
    isWhole ? tools(record) : null,
  ];
  const made = pieces.filter(Boolean);
  if (place.dataset.request === record.request_id) renew(place, made);
  else place.replaceChildren(...made);
  place.dataset.request = record.request_id;
}

function headline(record) {
  const first = record.first_token;
  const said = record.message ? ` It ended with ${record.outcome}: ${record.message}` : "";
  if (!first) {
    const total = record.timing?.total_s;
    return element("p", {
      text: total ? `It took ${milliseconds(total)}.${said}` : `No token has come yet.${said}`,
    });
  }
  const longest = first.longest_part;
  const isOpen = longest === "worker" && record.outcome === "running"; // The worker reports at the end.
  const part = isOpen ? "the worker's work" : words(longest).toLowerCase();
  return element(
    "p",
    {},
    "The first token came after ",
    element("b", { text: milliseconds(first.at_s) }),
    "; most of that is ",
    element("b", { text: part }),
    ` (${milliseconds(first.parts[longest])}).${said}`,
  );
}

function facts(record, browserSeconds) {
  const first = record.first_token ?? {};
  const ratio = first.predicted_s && first.actual_s ? (first.predicted_s / first.actual_s).toFixed(2) : null;
  const named = {
    Outcome: record.outcome,
    Kind: record.modality,
    "First token": milliseconds(first.at_s ?? record.timing?.first_token_s),
    Total: milliseconds(record.whole?.total_s ?? record.timing?.total_s),
    "In the browser": milliseconds(browserSeconds),
    "Predicted / actual": ratio,
    "Bound / actual": first.overlap_efficiency?.toFixed(2),
    "Prompt tokens": record.num_prompt_tokens,
    "Generated tokens": record.usage?.completion_tokens,
    Attempts: record.plans?.length > 1 ? record.plans.length : null,
    Request: record.request_id,
  };
  const shown = Object.entries(named).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return element(
    "dl",
    { class: "facts-list" },
    ...shown.map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: value }))),
  );
}

// ------------------------------------------------------------ parts

function partsOf(record) {
  if (!record.whole) return null;
  const { parts, total_s: total } = record.whole;
  const shown = Object.entries(parts).filter(([, seconds]) => Math.abs(seconds) >= NO_TIME_S);
  const sum = shown.reduce((before, [, seconds]) => before + seconds, 0);
  const bar = element("div", { class: "parts-bar", "aria-hidden": "true" });
  for (const [name, seconds] of shown) {
    bar.append(
      element("span", {
        title: words(name),
        style: { width: `${(Math.max(0, seconds) / total) * 100}%`, background: colourOf(name) },
      }),
    );
  }
  const columns = [
    {
      title: "Part",
      show: ([name]) =>
        element("span", {}, element("span", { class: "swatch", style: { background: colourOf(name) } }), words(name)),
    },
    {
      title: "Time",
      isNumber: true,
      show: ([, seconds]) => element("data", { value: seconds, text: milliseconds(seconds) }),
    },
    { title: "Share", isNumber: true, show: ([, seconds]) => percent(Math.max(0, seconds) / total) },
  ];
  const footer = element(
    "tr",
    {},
    element("td", { text: "Sum of the parts" }),
    element("td", { class: "number" }, element("data", { value: sum, text: milliseconds(sum) })),
    element("td", { class: "number", text: percent(sum / total) }),
  );
  return element(
    "div",
    { class: "parts" },
    bar,
    table(columns, shown, { caption: "Parts of the request's time", footer }),
  );
}

// ------------------------------------------------------------ the waterfall

function waterfall(record) {
  const spans = (record.timeline ?? []).slice(0, MAX_SPANS);
  if (!spans.length) return null;
  const begin = Math.min(0, ...spans.map((span) => span.begin_s));
  const end = Math.max(...spans.map((span) => span.end_s), record.whole?.total_s ?? 0);
  const scale = 100 / Math.max(end - begin, 1e-9);
  const firstAt = record.first_token?.at_s;
  const rows = spans.map((span) => {
    const took = span.end_s - span.begin_s;
    const track = element("span", { class: "track" });
    const left = `${(span.begin_s - begin) * scale}%`;
    track.append(element("i", { style: { left, width: `${took * scale}%`, background: colourOf(span.name) } }));
    if (firstAt !== undefined) track.append(element("u", { style: { left: `${(firstAt - begin) * scale}%` } }));
    const where = placeOf(span);
    const unsure = span.uncertainty_s ? `, within ${milliseconds(span.uncertainty_s)}` : "";
    const told = `${words(span.name)}, ${where}: from ${milliseconds(span.begin_s)} to ${milliseconds(span.end_s)}${unsure}`;
    return element(
      "li",
      { title: told },
      element("span", { class: "name" }, words(span.name), element("span", { class: "dim", text: ` ${where}` })),
      track,
      element("span", {
        class: "took",
        text: took > 0 ? milliseconds(took) : `at ${milliseconds(span.begin_s)}`,
      }),
    );
  });
  const more = (record.timeline.length ?? 0) - spans.length;
  return element(
    "div",
    {},
    element("h3", { text: "Waterfall" }),
    element("ol", { class: "waterfall" }, ...rows),
    more > 0 ? element("p", { class: "dim", text: `${more} more spans are in the export.` }) : null,
    element("p", { class: "dim", text: "The dashed line is the first token." }),
  );
}

function placeOf(span) {
  const { item, unit, start, end } = span.detail;
  const pieces = [];
  if (item !== undefined && item !== null) pieces.push(`item ${item}`);
  if (unit !== undefined && unit !== null) pieces.push(`unit ${unit}`);
  if (start !== undefined && end !== undefined) pieces.push(`tokens ${start} to ${end}`);
  if (span.attempt) pieces.push(`attempt ${span.attempt}`);
  return [...pieces, shortName(span.member_id)].join(", ");
}

// ------------------------------------------------------------ the decision

function decision(entry) {
  const { plan } = entry;
  const { explanation } = plan;
  const rows = entry.pairs ?? [explanation.winner, ...(explanation.alternatives ?? [])];
  const assigned = plan.assignments.map((each) => each.encoder_id).join();
  const isChosen = (row) =>
    row.worker_id === plan.worker_id && row.items.map((each) => each.encoder_id).join() === assigned;
  const isListed = rows.some(isChosen);
  const shown = isListed ? rows : [explanation.winner, ...rows];
  const covered = plan.covered_items.length ? ` ${plan.covered_items.length} of the media lie in its KV cache.` : "";
  const explored = explanation.is_explored ? " It was chosen to learn about it." : "";
  const near =
    explanation.num_near_equal > 1
      ? ` ${explanation.num_near_equal} workers were near-equal; it had the fewest open requests.`
      : "";
  const lead = element(
    "p",
    {},
    "The router chose ",
    element("b", { text: plan.worker_id }),
    assigned ? " with " : "",
    assigned ? element("b", { text: [...new Set(plan.assignments.map((each) => each.encoder_id))].join(", ") }) : "",
    `, and predicted the first token in ${milliseconds(plan.predicted_ttft_s)} (${milliseconds(plan.lower_bound_s)} with empty queues).${near}${explored}${covered}`,
  );
  const numPairs = entry.num_pairs ?? explanation.num_workers;
  const what = entry.pairs ? "pairs of a worker and an encoder" : "workers, each with its best encoders";
  const note = element("p", {
    class: "dim",
    text: `It scored ${numPairs} ${what}; ${Math.min(rows.length, numPairs)} are shown, the best first. The marked one was chosen.`,
  });
  return element(
    "div",
    { class: "decision" },
    element("h3", {
      text: entry.attempt ? `The router's decision, attempt ${entry.attempt}` : "The router's decision",
    }),
    lead,
    note,
    heat(shown, isChosen),
    pairTable(shown, isChosen),
    itemTable(shown, isChosen),
  );
}

/** Returns a grid of the predicted first token, workers by encoders, where there are both. */
function heat(rows, isChosen) {
  const single = rows.filter((row) => new Set(row.items.map((each) => each.encoder_id)).size === 1);
  const encoders = [...new Set(single.map((row) => row.items[0].encoder_id))].sort();
  const workers = [...new Set(single.map((row) => row.worker_id))].sort();
  if (!encoders.length || encoders.length * workers.length < 2) return null;
  const times = single.map((row) => row.ttft_s);
  const [least, most] = [Math.min(...times), Math.max(...times)];
  const head = element(
    "tr",
    {},
    element("th", { text: "First token" }),
    ...encoders.map((each) => element("th", { scope: "col", class: "number", text: shortName(each), title: each })),
  );
  const body = workers.map((worker) =>
    element(
      "tr",
      {},
      element("th", { scope: "row", text: shortName(worker), title: worker }),
      ...encoders.map((encoder) => {
        const row = single.find((each) => each.worker_id === worker && each.items[0].encoder_id === encoder);
        if (!row) return element("td", { text: "–" });
        const heat = most > least ? (row.ttft_s - least) / (most - least) : 0;
        const background = `color-mix(in srgb, var(--heat) ${Math.round(heat * 55)}%, transparent)`;
        return element("td", {
          class: isChosen(row) ? "chosen" : undefined,
          "aria-current": isChosen(row) ? "true" : undefined,
          text: milliseconds(row.ttft_s),
          style: { background },
        });
      }),
    ),
  );
  return element(
    "div",
    { class: "scroll heat", tabindex: "0", role: "region", "aria-label": "Predicted first token of each pair" },
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)),
  );
}

function pairTable(rows, isChosen) {
  const encodersOf = (row) =>
    [...new Set(row.items.map((each) => each.encoder_id))].map(shortName).join(", ") || "none needed";
  const columns = [
    { title: "Worker", show: (row) => shortName(row.worker_id) },
    { title: "Encoder", show: encodersOf },
    ...PAIR_TERMS.map((name) => ({ title: words(name), isNumber: true, show: (row) => termOf(name, row[name]) })),
  ];
  return table(columns, rows, { caption: "Terms of each pair", isBest: isChosen });
}

function itemTable(rows, isChosen) {
  const items = rows.flatMap((row) =>
    row.items.map((item) => ({ ...item, worker_id: row.worker_id, isBest: isChosen(row) })),
  );
  if (!items.length) return null;
  const columns = [
    { title: "Worker", show: (item) => shortName(item.worker_id) },
    { title: "Encoder", show: (item) => shortName(item.encoder_id) },
    { title: "Medium", show: (item) => `${item.item_index} (${item.modality || "medium"})` },
    ...ITEM_TERMS.map((name) => ({ title: words(name), isNumber: true, show: (item) => termOf(name, item[name]) })),
  ];
  return element(
    "details",
    { class: "more", open: items.length <= 8 },
    element("summary", { text: "Landing of each medium" }),
    table(columns, items, { caption: "Terms of each medium", isBest: (item) => item.isBest }),
  );
}

function termOf(name, value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (name.endsWith("_s")) return milliseconds(value);
  return name === "num_bytes" ? sizeOf(value) : String(value);
}

// ------------------------------------------------------------ stages and export

function stages(record) {
  if (!record.stages?.length) return null;
  const columns = [
    { title: "Stage", show: (row) => words(row.stage) },
    { title: "Member", show: (row) => shortName(row.member_id) },
    { title: "Medium", show: (row) => (row.item === null ? "" : String(row.item)) },
    { title: "Predicted", isNumber: true, show: (row) => milliseconds(row.predicted_s) },
    { title: "Actual", isNumber: true, show: (row) => milliseconds(row.actual_s) },
    {
      title: "Ratio",
      isNumber: true,
      show: (row) => (row.actual_s > 0 ? (row.predicted_s / row.actual_s).toFixed(2) : ""),
    },
  ];
  return element(
    "details",
    { class: "more" },
    element("summary", { text: "Predicted against actual" }),
    table(columns, record.stages, { caption: "Predicted against actual" }),
  );
}

function tools(record) {
  const problem = element("span", { class: "error", role: "alert" });
  const id = encodeURIComponent(record.request_id);
  const download = (path, name) => () =>
    save(path, name).catch((error) => {
      problem.textContent = error.message;
    });
  return element(
    "div",
    { class: "row wrap record-tools" },
    element("button", {
      text: "Export for Perfetto",
      onclick: download(`weft/spans?request_id=${id}`, `${record.request_id}.perfetto.json`),
    }),
    element("button", {
      class: "quiet",
      text: "Save as JSON",
      onclick: download(`weft/requests/${id}?format=json`, `${record.request_id}.json`),
    }),
    problem,
  );
}
