// The conversation: messages, settings, streamed answers, and their cost.

import { ask, events, remember, remembered, ServerError } from "./client.js";
import { element, show } from "./markdown.js";

const by = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const RANGES = { temperature: 0.7, top_p: 0.95 };
const OWN = "model’s own";

export class Chat {
  constructor({ onKeyNeeded, toast, requestOf, onRequest }) {
    this.requestOf = requestOf;
    this.onRequest = onRequest;
    this.onKeyNeeded = onKeyNeeded;
    this.toast = toast;
    this.model = "";
    this.longest = 0;
    this.running = null;
    this.messages = remembered("messages", []).filter(isMessage);
    this.settings = remembered("settings", {});
    this.wireSettings();
    this.wireComposer();
    this.wireLog();
    this.render();
    this.showContext();
  }

  // ---- settings

  wireSettings() {
    by("system").value = this.settings.system ?? "";
    by("system").addEventListener("input", (event) => this.set("system", event.target.value));
    for (const name of NUMBERS) {
      const field = by(name);
      field.addEventListener("input", () => {
        this.set(name, field.value === "" || !field.validity.valid ? null : Number(field.value));
      });
    }
    by("reset").addEventListener("click", () => {
      this.settings = { system: this.settings.system };
      this.set("system", this.settings.system ?? "");
      this.showSettings();
    });
    this.showSettings();
  }

  set(name, value) {
    this.settings[name] = value;
    remember("settings", this.settings);
    this.showSettingWords();
  }

  showSettings() {
    for (const name of NUMBERS) by(name).value = this.settings[name] ?? RANGES[name] ?? "";
    this.showSettingWords();
  }

  showSettingWords() {
    for (const name of Object.keys(RANGES)) {
      const value = this.settings[name];
      by(`${name}-words`).textContent = value ?? OWN;
      by(name).classList.toggle("unset", value == null);
      by(name).setAttribute("aria-valuetext", value == null ? OWN : String(value));
    }
    const words = NUMBERS.filter((name) => this.settings[name] != null).map((name) => `${name.replace("_", " ")} ${this.settings[name]}`);
    if (this.settings.system?.trim()) words.unshift("system prompt");
    by("settings-words").textContent = words.join(" · ") || "all set to the model’s defaults";
  }

  // ---- composer

  wireComposer() {
    const prompt = by("prompt");
    prompt.addEventListener("input", () => fit(prompt));
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.send();
      } else if (event.key === "ArrowUp" && !prompt.value && !this.running) {
        const last = this.messages.findLastIndex((message) => message.role === "user");
        if (last >= 0) {
          event.preventDefault();
          this.edit(last);
        }
      }
    });
    by("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open]")) this.stop();
    });
    by("clear").addEventListener("click", () => this.clear());
    by("ideas").addEventListener("click", (event) => {
      if (!(event.target instanceof HTMLButtonElement)) return;
      prompt.value = event.target.textContent;
      this.send();
    });
  }

  send() {
    const prompt = by("prompt");
    const content = prompt.value.trim();
    if (!content) return;
    prompt.value = "";
    fit(prompt);
    this.messages.push({ role: "user", content });
    this.answer();
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    const before = this.messages;
    const show = (messages) => {
      this.messages = messages;
      this.keep();
      this.render();
      this.showContext();
    };
    show([]);
    by("prompt").focus();
    this.toast("The conversation is cleared.", () => show(before));
  }

  // ---- an answer

  request() {
    const messages = this.messages
      .filter((message) => message.content)
      .map(({ role, content }) => ({ role, content }));
    if (this.settings.system?.trim()) messages.unshift({ role: "system", content: this.settings.system });
    const body = { model: this.model, messages, stream: true, stream_options: { include_usage: true } };
    for (const name of NUMBERS) if (this.settings[name] != null) body[name] = this.settings[name];
    return body;
  }

  async answer() {
    const body = this.request();
    const message = { role: "assistant", content: "", reasoning: "" };
    const clock = { sent: performance.now(), first: 0, last: 0, chunks: 0, prompt: 0, cached: 0, usage: null, finish: null };
    const before = this.tokens();
    this.messages.push(message);
    const running = new AbortController();
    this.running = running;
    document.body.classList.add("running");
    by("send").setAttribute("aria-label", "Stop");
    this.render();
    this.stick(true);
    const article = by("log").lastElementChild;
    article.setAttribute("aria-busy", "true");
    try {
      const answer = await ask("v1/chat/completions", { body, signal: running.signal });
      for await (const event of events(answer)) {
        this.take(event, message, clock);
        this.showRates(figures(clock));
        this.showContext((clock.prompt || before) + clock.chunks);
        this.draw(message);
      }
      if (!clock.finish) message.fault = "The stream ended before the answer did.";
    } catch (error) {
      if (error.name === "AbortError") message.stopped = true;
      else message.fault = error instanceof ServerError ? error.message : "The stream broke off.";
      if (error.status === 401) this.onKeyNeeded();
    }
    message.figures = figures(clock);
    message.tokens = clock.usage ? clock.usage.prompt_tokens + clock.usage.completion_tokens : (clock.prompt || before) + clock.chunks;
    this.finish(running);
  }

  finish(running) {
    if (this.running !== running) return;
    this.running = null;
    document.body.classList.remove("running");
    by("send").setAttribute("aria-label", "Send");
    this.keep();
    this.render();
    this.showContext();
    this.stick(false);
  }

  take(event, message, clock) {
    if (event.error) throw new ServerError(0, event.error.message ?? "The server could not go on.");
    if (event.usage) clock.usage = event.usage;
    if (event.id) this.onRequest(event.id);
    // The map knows the length of the prompt long before the usage arrives.
    const seen = clock.prompt ? null : this.requestOf(event.id);
    if (seen) [clock.prompt, clock.cached] = [seen.prompt_tokens, seen.cached_tokens ?? 0];
    const choice = event.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) clock.finish = choice.finish_reason;
    const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
    const content = choice.delta?.content ?? "";
    for (const call of choice.delta?.tool_calls ?? []) {
      message.content += `${call.function?.name ? `\n\n\`${call.function.name}\` ` : ""}${call.function?.arguments ?? ""}`;
    }
    message.reasoning += thought;
    message.content += content;
    if (!thought && !content) return;
    clock.last = performance.now();
    clock.first ||= clock.last;
    clock.chunks++;
  }

  // One drawing a frame, however many events came.
  draw(message) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.messages.at(-1) !== message || !this.running) return;
      const isAtEnd = this.isAtEnd();
      fill(by("log").lastElementChild, message, true);
      if (isAtEnd) this.stick(true);
    });
  }

  showRates({ promptRate, outputRate }) {
    if (promptRate) by("prompt-rate").textContent = rate(promptRate);
    if (outputRate) by("output-rate").textContent = rate(outputRate);
  }

  // ---- the log

  wireLog() {
    by("log").addEventListener("click", (event) => {
      const button = event.target instanceof Element ? event.target.closest("button") : null;
      if (!button) return;
      if (button.dataset.copy) this.copy(button);
      const at = Number(button.closest("article")?.dataset.at);
      if (button.dataset.act === "edit") this.edit(at);
      if (button.dataset.act === "again") this.again(at);
    });
  }

  async copy(button) {
    const code = button.closest("figure.code")?.querySelector("code");
    const at = Number(button.closest("article")?.dataset.at);
    const text = button.dataset.copy === "code" ? code.textContent : this.messages[at].content;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => {
      button.textContent = "Copy";
    }, 1500);
  }

  again(at) {
    if (this.running) return;
    this.messages.length = at;
    this.answer();
  }

  edit(at) {
    if (this.running) return;
    const article = by("log").children[at];
    const field = element("textarea");
    field.value = this.messages[at].content;
    field.setAttribute("aria-label", "Edit the message");
    const cancel = element("button", "quiet", "Cancel");
    cancel.type = "button";
    const row = element("div", "row", cancel, element("button", "solid", "Ask again"));
    const form = element("form", "edit", field, row);
    article.replaceChildren(form);
    fit(field);
    field.focus();
    const leave = () => {
      this.render();
      by("prompt").focus();
    };
    const done = (event) => {
      event.preventDefault();
      const content = field.value.trim();
      if (!content) return;
      this.messages.length = at;
      this.messages.push({ role: "user", content });
      this.answer();
      by("prompt").focus();
    };
    cancel.addEventListener("click", leave);
    form.addEventListener("submit", done);
    field.addEventListener("input", () => fit(field));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) done(event);
    });
  }

  render() {
    const log = by("log");
    const articles = this.messages.map((message, at) => {
      const old = log.children[at];
      const article = old?.message === message ? old : element("article", message.role);
      article.message = message;
      article.dataset.at = at;
      fill(article, message, Boolean(this.running) && at === this.messages.length - 1, at === this.messages.length - 1);
      return article;
    });
    log.replaceChildren(...articles);
    by("hello").hidden = this.messages.length > 0;
    by("clear").disabled = this.messages.length === 0;
    this.showRates(this.messages.findLast((message) => message.figures)?.figures ?? {});
  }

  keep() {
    remember("messages", this.messages.slice(-400));
  }

  // ---- context

  tokens() {
    return this.messages.findLast((message) => message.tokens)?.tokens ?? 0;
  }

  showContext(tokens = this.tokens()) {
    const gauge = by("context");
    gauge.max = this.longest || 1;
    gauge.value = Math.min(tokens, gauge.max);
    gauge.classList.toggle("near", this.longest > 0 && tokens > 0.85 * this.longest);
    const most = this.longest ? ` / ${this.longest.toLocaleString("en")}` : "";
    by("context-words").textContent = `${tokens.toLocaleString("en")}${most}`;
  }

  // ---- scrolling

  isAtEnd() {
    const room = by("scroll");
    return room.scrollHeight - room.scrollTop - room.clientHeight < 80;
  }

  stick(isForced) {
    const room = by("scroll");
    if (isForced || this.isAtEnd()) room.scrollTop = room.scrollHeight;
  }
}

function isMessage(value) {
  return (value?.role === "user" || value?.role === "assistant") && typeof value.content === "string";
}

function figures({ sent, first, last, chunks, prompt, cached: seen, usage, finish }) {
  const promptTokens = usage?.prompt_tokens ?? prompt;
  const outputTokens = usage?.completion_tokens ?? chunks;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? seen;
  const wait = first ? (first - sent) / 1000 : 0;
  const span = (last - first) / 1000;
  return {
    promptTokens,
    cached,
    outputTokens,
    wait,
    finish,
    promptRate: wait > 0 ? (promptTokens - cached) / wait : 0,
    outputRate: span > 0.02 && outputTokens > 1 ? (outputTokens - 1) / span : 0,
  };
}

export function rate(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

// Renders a message into its article. While it streams, only its text changes.
function fill(article, message, isRunning, isLast = true) {
  if (message.role === "user") {
    article.replaceChildren(element("p", "said", message.content), actions(["copy", "edit"]));
    return;
  }
  article.setAttribute("aria-busy", String(isRunning));
  let text = article.querySelector(":scope > .text");
  if (!text) {
    text = element("div", "text");
    article.append(text);
  }
  thoughts(article, text, message, isRunning);
  show(text, message.content);
  article.classList.toggle("waiting", isRunning && !message.content && !message.reasoning);
  for (const node of article.querySelectorAll(":scope > .fault, :scope > footer")) node.remove();
  if (isRunning) return;
  if (message.fault) article.append(element("p", "fault", message.fault));
  const foot = actions(isLast ? ["copy", "again"] : ["copy"]);
  foot.prepend(element("span", "cost", costWords(message)));
  article.append(foot);
}

function thoughts(article, text, message, isRunning) {
  let box = article.querySelector(":scope > details.thoughts");
  if (!message.reasoning) return;
  if (!box) {
    box = element("details", "thoughts", element("summary"), element("div", "text"));
    article.insertBefore(box, text);
  }
  box.firstChild.textContent = isRunning && !message.content ? "Thinking…" : "Thoughts";
  show(box.lastChild, message.reasoning);
}

function actions(names) {
  const foot = element("footer");
  const words = { copy: "Copy", edit: "Edit", again: "Regenerate" };
  for (const name of names) {
    const button = element("button", "quiet", words[name]);
    button.type = "button";
    if (name === "copy") button.dataset.copy = "message";
    else button.dataset.act = name;
    foot.append(button);
  }
  return foot;
}

function costWords({ figures: cost, stopped }) {
  if (!cost) return "";
  const words = [];
  if (cost.outputTokens) words.push(`${cost.outputTokens.toLocaleString("en")} tokens`);
  if (cost.outputRate) words.push(`${rate(cost.outputRate)} tok/s`);
  if (cost.wait) words.push(`first after ${cost.wait.toFixed(2)} s`);
  if (cost.promptTokens) words.push(`prompt ${cost.promptTokens.toLocaleString("en")}${cost.cached ? ` (${cost.cached} cached)` : ""}`);
  if (stopped) words.push("stopped");
  else if (cost.finish === "length") words.push("cut at the limit");
  return words.join(" · ");
}

function fit(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, 240)}px`;
}
