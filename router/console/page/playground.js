// The playground: a conversation with the model, with media, and the record of its last request beside it.

import { byId, element, milliseconds } from "./elements.js";
import { Medium, hasCamera, kindOf, openCamera } from "./media.js";
import { showRecord } from "./record.js";
import { chat } from "./server.js";

/** Holds the conversation as the API takes it, and what waits to be sent. */
const state = { model: null, modalities: null, messages: [], attached: [], running: null, failed: () => {} };

/** `failed` is called when a request has failed, since the cluster may be another one now. */
export function startPlayground(failed) {
  state.failed = failed;
  byId("send").onclick = send;
  byId("stop").onclick = () => state.running?.abort();
  byId("clear").onclick = clear;
  byId("attach").onclick = () => byId("file").click();
  byId("file").onchange = (event) => {
    attachAll(event.target.files);
    event.target.value = "";
  };
  byId("camera").hidden = !hasCamera();
  byId("camera").onclick = () => openCamera((file) => attachAll([file]));
  byId("prompt").onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  byId("prompt").onpaste = (event) => {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      attachAll(event.clipboardData.files);
    }
  };
  startDrops(byId("drop"));
}

/** Takes files that are dropped on `area`. Beside it, a browser would leave the page and open the file. */
function startDrops(area) {
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  for (const name of ["dragenter", "dragover", "drop"]) {
    addEventListener(name, (event) => {
      if (!hasFiles(event)) return;
      const isInside = area.contains(event.target);
      event.preventDefault();
      area.classList.toggle("over", isInside && name !== "drop");
      if (name === "drop" && isInside) attachAll(event.dataTransfer.files);
      else if (!isInside) event.dataTransfer.dropEffect = "none";
    });
  }
  area.addEventListener("dragleave", (event) => {
    if (!area.contains(event.relatedTarget)) area.classList.remove("over");
  });
}

/** Takes what `/v1/models` says of the model. */
export function useModel(model) {
  state.model = model.id;
  state.modalities = model.input_modalities;
  const media = state.modalities.filter((each) => each !== "text");
  byId("attach").hidden = !media.length;
  byId("camera").hidden = !hasCamera() || !media.includes("image");
  byId("file").accept = media.map((each) => `${each}/*`).join(",");
}

// ------------------------------------------------------------ media that wait

function attachAll(files) {
  for (const file of files) {
    const kind = kindOf(file);
    if (kind === null) {
      say(`${file.name} is no picture, video or sound.`);
    } else if (state.modalities && !state.modalities.includes(kind)) {
      say(`The model ${state.model} takes no ${kind}, so ${file.name} was not attached.`);
    } else {
      state.attached.push(new Medium(file, kind));
    }
  }
  listAttached();
  byId("prompt").focus();
}

function listAttached() {
  const items = state.attached.map((medium) => {
    const remove = () => {
      state.attached = state.attached.filter((each) => each !== medium);
      listAttached();
      byId("prompt").focus();
    };
    const button = element("button", {
      class: "quiet",
      text: "×",
      "aria-label": `Remove ${medium.name}`,
      onclick: remove,
    });
    return element("li", {}, element("span", { text: medium.name }), button);
  });
  byId("attached").replaceChildren(...items);
}

// ------------------------------------------------------------ the conversation

function clear() {
  state.running?.abort();
  state.messages = [];
  byId("messages").replaceChildren(byId("hint") ?? element("p", { class: "hint", id: "hint", text: "Ask the model." }));
  byId("prompt").focus();
}

function add(node) {
  byId("hint")?.remove();
  const messages = byId("messages");
  const isAtEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 80;
  messages.append(node);
  if (isAtEnd) messages.scrollTop = messages.scrollHeight;
}

function say(problem) {
  add(element("p", { class: "message error", role: "alert", text: problem }));
}

async function send() {
  const prompt = byId("prompt");
  const text = prompt.value.trim();
  const media = state.attached;
  if (state.running || (!text && !media.length)) return;
  const own = new AbortController();
  state.running = own;
  busy(true);
  const shown = media.length ? element("div", { class: "media" }, ...media.map((each) => each.shown())) : null;
  add(element("div", { class: "message user" }, shown, element("div", { class: "said", text })));
  prompt.value = "";
  state.attached = [];
  listAttached();
  const turn = new Turn();
  add(turn.node);
  const { messages } = state; // A new conversation may begin before this answer has come.
  const before = messages.length;
  try {
    const parts = await Promise.all(media.map((each) => each.part()));
    const content = parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text;
    messages.push({ role: "user", content });
    await turn.run(body(messages), own.signal);
    messages.push({ role: "assistant", content: turn.text });
  } catch (error) {
    const isStopped = error.name === "AbortError";
    if (isStopped) turn.note("stopped");
    else turn.fail(error.message);
    if (isStopped && turn.text) {
      messages.push({ role: "assistant", content: turn.text });
    } else {
      messages.length = before;
      if (messages === state.messages) giveBack(text, media);
    }
    if (!isStopped) state.failed();
  } finally {
    turn.end();
    state.running = null;
    busy(false);
  }
}

/** Puts a message that has no answer back where it was written, to be changed or sent again. */
function giveBack(text, media) {
  if (!byId("prompt").value) byId("prompt").value = text;
  state.attached = [...media, ...state.attached];
  listAttached();
}

/** Shows the button that stops an answer, or the one that sends. The focus goes on from a button that disappears. */
function busy(isBusy) {
  const [shown, gone] = isBusy ? [byId("stop"), byId("send")] : [byId("send"), byId("stop")];
  const hadFocus = document.activeElement === gone;
  shown.hidden = false;
  if (hadFocus) (isBusy ? shown : byId("prompt")).focus();
  gone.hidden = true;
}

/** Returns the body of a request for the conversation and the settings. */
function body(messages) {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const system = byId("system").value.trim();
  const isStreamed = byId("streamed").checked;
  return {
    model: state.model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    top_p: number("top-p"),
    seed: number("seed"),
    stream: isStreamed,
    ...(isStreamed ? { stream_options: { include_usage: true } } : {}),
    weft: { explain: true, keep_pairs: true },
  };
}

/** A `Turn` is an answer while it comes. */
class Turn {
  constructor() {
    this.text = "";
    this.reason = null;
    this.thought = element("div", { class: "thought", hidden: true });
    this.said = element("div", { class: "said", text: "…" });
    this.facts = element("div", { class: "facts" });
    // A screen reader reads the whole answer when it is there, and not again with every token.
    this.node = element(
      "div",
      { class: "message assistant", "aria-busy": "true" },
      this.thought,
      this.said,
      this.facts,
    );
  }

  end() {
    this.node.removeAttribute("aria-busy");
  }

  async run(request, signal) {
    const began = performance.now();
    let firstAt = null;
    let usage = null;
    let record = null;
    for await (const { chunk, whole } of chat(request, signal)) {
      const came = chunk ?? whole;
      const choice = came.choices[0];
      const piece = chunk ? choice?.delta : choice?.message;
      if (firstAt === null && (piece?.content || piece?.reasoning_content)) firstAt = performance.now();
      this.take(piece ?? {});
      this.reason = choice?.finish_reason ?? this.reason;
      usage = came.usage ?? usage;
      record = came.weft?.explain ?? record;
    }
    const ended = performance.now();
    if (!this.text) this.said.textContent = this.thought.hidden ? "(an empty answer)" : "";
    const facts = [
      firstAt === null || !request.stream ? null : `first token ${milliseconds((firstAt - began) / 1000)}`,
    ];
    facts.push(`${milliseconds((ended - began) / 1000)} in the browser`);
    if (usage) facts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
    if (this.reason === "length") facts.push("cut off: no more tokens were allowed");
    this.note(facts.filter(Boolean).join(" · "));
    if (record) showRecord(byId("last"), record, { browserSeconds: (ended - began) / 1000 });
  }

  take({ content, reasoning_content: thought, refusal }) {
    if (thought) {
      this.thought.hidden = false;
      this.thought.textContent += thought;
    }
    const text = content || refusal;
    if (!text) return;
    this.text += text;
    this.said.textContent = this.text;
    const messages = byId("messages");
    if (messages.scrollHeight - messages.scrollTop - messages.clientHeight < 120)
      messages.scrollTop = messages.scrollHeight;
  }

  note(facts) {
    if (!this.text) this.said.textContent = this.said.textContent === "…" ? "" : this.said.textContent;
    this.facts.textContent = facts;
  }

  fail(message) {
    if (!this.text) this.said.textContent = "";
    this.node.append(element("div", { class: "error", role: "alert", text: message }));
  }
}
