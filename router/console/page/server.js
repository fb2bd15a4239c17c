// Speaks with the router that served the page: reads JSON, and streams the answers of chats. It keeps the API key.

import { keep, kept } from "./elements.js";

const KEY_NAME = "weft-api-key";
const READ_LIMIT_MS = 10_000;
const BROKE_OFF = "The answer broke off.";
let apiKey = kept("sessionStorage", KEY_NAME) || "";

/** A `Refusal` is an answer that is no success, with the words of the server. */
export class Refusal extends Error {
  constructor(message, status, code, body = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.body = body;
  }
}

export function hasKey() {
  return apiKey !== "";
}

export function useKey(key) {
  apiKey = key.trim();
  keep("sessionStorage", KEY_NAME, apiKey);
}

/** Returns the error of an exchange that broke off, in words. One that the person has stopped stays as it is. */
function broken(error, message) {
  if (error.name === "AbortError" || error instanceof Refusal) return error;
  return new Refusal(error.name === "TimeoutError" ? "The server does not answer." : message, 0, "unreachable");
}

/** Asks the server. Throws a `Refusal` for an answer that is no success. No password of the browser goes with it. */
export async function ask(path, options = {}) {
  const headers = { accept: "application/json", ...options.headers };
  if (apiKey) headers.authorization = `Bearer ${apiKey}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    throw broken(error, "The server can't be reached.");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  const said = body?.error ?? {};
  throw new Refusal(said.message ?? `The server answered ${answer.status}.`, answer.status, said.code ?? "", body);
}

/** Reads JSON, with the headers of the answer. A server that does not answer in time counts as one that is away. */
export async function readWithHeaders(path) {
  const answer = await ask(path, { signal: AbortSignal.timeout(READ_LIMIT_MS) });
  try {
    return { content: await answer.json(), headers: answer.headers };
  } catch (error) {
    throw broken(error, "The server's answer broke off.");
  }
}

export async function read(path) {
  return (await readWithHeaders(path)).content;
}

/**
 * Sends a chat and yields what comes: `{chunk}` for each event, or `{whole}`. Throws a `Refusal` for an answer that breaks
 * off. The server stops a request of which nothing more is read.
 */
export async function* chat(body, signal) {
  const answer = await ask("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "content-type": "application/json" },
    signal,
  });
  if (!body.stream) {
    yield {
      whole: await answer.json().catch((error) => {
        throw broken(error, BROKE_OFF);
      }),
    };
    return;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let isWhole = false;
  try {
    for await (const data of events(reader)) {
      if (data === "[DONE]") {
        isWhole = true;
        continue;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(chunk.error.message, 200, chunk.error.code);
      yield { chunk };
    }
    if (!isWhole) throw new Refusal(BROKE_OFF, 0, "unreachable");
  } catch (error) {
    throw broken(error, BROKE_OFF);
  } finally {
    if (!isWhole) reader.cancel().catch(() => {}); // One that has failed can't be cancelled, and need not be.
  }
}

/** Yields the data of each event of a stream. */
async function* events(reader) {
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

/** Saves what a path answers as a file of the person's computer. */
export async function save(path, fileName) {
  const answer = await ask(path);
  const content = await answer.blob().catch((error) => {
    throw broken(error, BROKE_OFF);
  });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = fileName;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
