// Start of the page: theme, views, API key, model name, and the connection to the server.

import { Chat } from "./chat.js";
import { apiKey, ask, events, keepKey, remember, remembered } from "./client.js";
import { MemoryMap } from "./map.js";

const by = (id) => document.getElementById(id);
const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

function startTheme() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const set = (theme) => {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
  };
  set(remembered("theme", null));
  by("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
    const theme = isDark ? "light" : "dark";
    // The system's own theme is not stored, so the page keeps following it.
    const kept = (theme === "dark") === dark.matches ? null : theme;
    remember("theme", kept);
    set(kept);
  });
}

function startViews() {
  const buttons = document.querySelectorAll("[data-show]");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.show;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
    });
  }
}

// Resolves when there is a key to try; the button opens the dialog again after a cancel.
class KeyDialog {
  constructor() {
    this.waiting = [];
    by("key").addEventListener("click", () => this.open());
    by("key-cancel").addEventListener("click", () => by("key-dialog").close());
    by("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const key = by("key-field").value.trim();
      if (!key) return;
      keepKey(key);
      by("key-field").value = "";
      by("key-dialog").close();
      for (const go of this.waiting.splice(0)) go();
    });
  }

  open(fault = "") {
    by("key").hidden = false;
    by("key-fault").textContent = fault;
    if (!by("key-dialog").open) by("key-dialog").showModal();
  }

  async wait() {
    this.open(apiKey() ? "The server does not know this key." : "");
    await new Promise((go) => this.waiting.push(go));
  }
}

function toast(words, undo) {
  by("toast-words").textContent = words;
  by("toast").hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => {
    by("toast").hidden = true;
  }, 8000);
  by("toast-undo").onclick = () => {
    by("toast").hidden = true;
    undo();
  };
}

function showLink(state, words) {
  by("link").dataset.state = state;
  if (by("link-words").textContent !== words) by("link-words").textContent = words;
}

async function findModel(chat) {
  const { data } = await (await ask("v1/models")).json();
  const model = data?.[0];
  chat.model = model?.id ?? "";
  chat.longest = model?.max_model_len ?? chat.longest;
  by("model").textContent = chat.model;
  document.title = chat.model ? `${chat.model} · Holdfast` : "Holdfast";
  chat.showContext();
}

// A hidden tab holds no connection: a browser has six to a server, for all of its tabs.
function whileSeen() {
  const control = new AbortController();
  const look = () => {
    if (!document.hidden) return;
    document.removeEventListener("visibilitychange", look);
    control.abort();
  };
  document.addEventListener("visibilitychange", look);
  return control.signal;
}

async function seen() {
  while (document.hidden) {
    await new Promise((go) => document.addEventListener("visibilitychange", go, { once: true }));
  }
}

// Follows the server: reads the model, then the memory stream, and reconnects after every break.
async function follow(chat, map, key) {
  let wait = 0.5;
  for (;;) {
    await seen();
    try {
      await findModel(chat);
      const answer = await ask("memory/stream", { signal: whileSeen() });
      for await (const facts of events(answer)) {
        if (facts.error) throw new Error(facts.error.message);
        map.take(facts);
        if (facts.memory?.max_model_len) {
          chat.longest = facts.memory.max_model_len;
          chat.showContext();
        }
        const { state = "ready", trouble = null } = map.facts;
        const words = trouble ? "trouble" : state === "ready" ? "live" : state;
        showLink(words === "live" ? "live" : "wait", words);
        by("link").title = trouble ?? "";
        wait = 0.5;
      }
      showLink("wait", "reconnecting");
    } catch (error) {
      if (error.name === "AbortError") continue;
      if (error.status === 401) {
        showLink("lost", "needs a key");
        await key.wait();
        continue;
      }
      showLink("lost", "no connection");
      map.lost();
    }
    await pause(wait);
    wait = Math.min(wait * 2, 8);
  }
}

startTheme();
startViews();
const key = new KeyDialog();
const map = new MemoryMap();
const chat = new Chat({
  onKeyNeeded: () => key.open("The server does not know this key."),
  toast,
  requestOf: (id) => map.request(id),
  onRequest: (id) => map.mark(id),
});
by("prompt").focus();
follow(chat, map, key);
