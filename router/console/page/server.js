// Speaks with the router that served the page: reads JSON, and streams the answers of chats. It keeps the API key.

const KEY_NAME = "weft-api-key";
let apiKey = sessionStorage.getItem(KEY_NAME) || "";

/** A `Refusal` is an answer that is no success, with the words of the server. */
export class Refusal extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function hasKey() {
  return apiKey !== "";
}

export function useKey(key) {
  apiKey = key.trim();
  if (apiKey) sessionStorage.setItem(KEY_NAME, apiKey);
  else sessionStorage.removeItem(KEY_NAME);
}

/** Asks the server. Throws a `Refusal` for an answer that is no success. No password of the browser goes with it. */
export async function ask(path, options = {}) {
  const headers = { accept: "application/json", ...options.headers };
  if (apiKey) headers.authorization = `Bearer ${apiKey}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server can't be reached.", 0, "unreachable");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  const said = body?.error ?? {};
  throw new Refusal(said.message ?? `The server answered ${answer.status}.`, answer.status, said.code ?? "");
}

export async function read(path) {
  return (await ask(path)).json();
}

/** Sends a chat and yields what comes: first `{head}` with the headers, then `{chunk}` for each event, or `{whole}`. */
export async function* chat(body, signal) {
  const answer = await ask("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "content-type": "application/json" },
    signal,
  });
  yield { head: answer.headers };
  if (!body.stream) {
    yield { whole: await answer.json() };
    return;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(chunk.error.message, 200, chunk.error.code);
      yield { chunk };
    }
  }
}

/** Saves what a path answers as a file of the person's computer. */
export async function save(path, fileName) {
  const content = await (await ask(path)).blob();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = fileName;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
