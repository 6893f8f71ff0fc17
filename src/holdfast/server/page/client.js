// Client of the server: JSON, event streams, error messages, and the API key of this tab.

const KEY = "holdfast.key";

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function keepKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Without storage the page needs the key again after a reload.
  }
}

export async function ask(path, { body = null, signal = undefined } = {}) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body ? JSON.stringify(body) : undefined,
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server does not answer. Is it still running?");
  }
  if (!answer.ok) throw new ServerError(answer.status, await faultWords(answer));
  return answer;
}

async function faultWords(answer) {
  try {
    const { error } = await answer.json();
    if (error?.message) return error.message;
  } catch {
    // Not JSON: a proxy may have answered.
  }
  return `The server answered ${answer.status} ${answer.statusText}`.trim() + ".";
}

// The data of every server-sent event, parsed; ends with the stream or its [DONE].
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (left + value).split("\n");
      left = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        if (line || !data.length) continue;
        const text = data.join("\n");
        data = [];
        if (text === "[DONE]") return;
        yield JSON.parse(text);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function remembered(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`holdfast.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`holdfast.${name}`, JSON.stringify(value));
  } catch {
    // Full or forbidden: the conversation then ends with the tab.
  }
}
