// The live memory map: owners to scale, KV pages by state and request, requests, throughput, events.
// Takes the facts of /memory, and draws at most once a frame, only what changed.

import { rate } from "./chat.js";
import { element } from "./markdown.js";

const by = (id) => document.getElementById(id);
const COLOURS = 12;
const SPAN_SECONDS = 120;
const KEEP_FINISHED_SECONDS = 6;
const MOST_ROWS = 40;
const OWNERS = ["kv pages", "weights", "workspace", "graphs", "sampling", "inputs", "rope", "unaccounted"];

export class MemoryMap {
  constructor() {
    this.facts = {};
    this.history = [];
    this.colours = new Map();
    this.finished = new Map();
    this.cells = [];
    this.frame = 0;
    this.isLost = false;
    this.mine = null;
    const room = new ResizeObserver(() => this.draw(true));
    room.observe(by("blocks"));
    room.observe(by("pages"));
    by("requests").addEventListener("pointerover", (event) => this.point(event.target));
    by("requests").addEventListener("pointerleave", () => this.point(null));
    by("pages").addEventListener("pointerover", (event) => {
      if (event.target.tagName === "I") event.target.title = this.cellWords(event.target);
    });
  }

  // ---- facts

  take(facts) {
    const before = this.facts;
    this.facts = { ...before, ...facts };
    if (facts.requests) this.facts.requests = facts.requests.map(named);
    if (this.isLost) this.tell("The connection is back.");
    this.isLost = false;
    document.body.classList.remove("lost");
    this.notice(before);
    this.remember();
    this.colour();
    this.draw();
  }

  // A running request, as the server last reported it.
  request(id) {
    return this.facts.requests?.find((request) => request.id === id) ?? null;
  }

  // Marks the request of this tab's chat; its row keeps the mark after it has ended.
  mark(id) {
    if (this.mine === id) return;
    this.mine = id;
    this.draw();
  }

  lost() {
    if (!this.isLost && this.facts.totals) this.tell("The connection was lost; this is what was last seen.", "bad");
    this.isLost = true;
    document.body.classList.add("lost");
  }

  notice(before) {
    const now = this.facts.totals;
    if (this.facts.trouble && this.facts.trouble !== before.trouble) this.tell(this.facts.trouble, "bad");
    if (before.state && before.state !== this.facts.state) this.tell(`The server is ${this.facts.state}.`, "bad");
    if (!now || !before.totals) return;
    if (now.requests < before.totals.requests) {
      this.history = [];
      this.tell("The server was started again.");
    }
    const preempted = (now.preemptions ?? 0) - (before.totals.preemptions ?? 0);
    if (preempted > 0) this.tell(`${count(preempted, "request was", "requests were")} preempted: no page was free.`, "bad");
    if (now.waiting > 0 && !before.totals.waiting) this.tell(`${count(now.waiting, "request waits", "requests wait")} for a place.`);
  }

  remember() {
    const { totals } = this.facts;
    if (!totals) return;
    const time = this.facts.time ?? Date.now() / 1000;
    this.history.push({ time, prompt: totals.prompt_tokens ?? 0, output: totals.output_tokens ?? 0 });
    while (this.history.length > 2 && this.history[1].time < time - SPAN_SECONDS - 2) this.history.shift();
  }

  // A request keeps its colour until its row is removed.
  colour() {
    const now = performance.now() / 1000;
    const there = new Set((this.facts.requests ?? []).map((request) => request.id));
    for (const [id, { request }] of this.colours) {
      if (!there.has(id) && !this.finished.has(id)) this.finished.set(id, { request, until: now + KEEP_FINISHED_SECONDS });
    }
    for (const [id, { until }] of this.finished) {
      if (until < now || there.has(id)) this.finished.delete(id);
      if (until < now && !there.has(id)) this.colours.delete(id);
    }
    const taken = new Set([...this.colours.values()].map(({ colour }) => colour));
    for (const request of this.facts.requests ?? []) {
      const known = this.colours.get(request.id);
      if (known) {
        known.request = request;
        continue;
      }
      let colour = 0;
      while (taken.has(colour)) colour++;
      taken.add(colour);
      this.colours.set(request.id, { colour, request });
    }
  }

  tell(words, kind = "") {
    const list = by("events");
    list.querySelector(".none")?.remove();
    const time = element("time", "", new Date().toLocaleTimeString("en-GB"));
    list.prepend(element("li", kind, time, element("span", "", words)));
    while (list.children.length > 30) list.lastChild.remove();
  }

  // ---- drawing

  draw(isResized = false) {
    this.isResized ||= isResized;
    if (this.frame || !this.facts.totals) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.facts.memory) this.drawMemory();
      if (this.facts.kv) this.drawPages();
      this.drawRequests();
      this.drawThroughput();
      this.isResized = false;
    });
  }

  drawMemory() {
    const { memory, kv } = this.facts;
    by("device").textContent = this.facts.device ?? "";
    const core = this.facts.processes?.core ?? null;
    if (this.core !== core || this.isResized || this.drawn !== memory) {
      this.core = core;
      drawAccounts(memory, core);
    }
    if (this.drawn !== memory || this.isResized) {
      this.drawn = memory;
      drawHeadline(memory);
      drawBlocks(memory);
      drawOwners(memory);
    }
    const block = by("blocks").querySelector(".o-kv-pages");
    if (!block || !kv) return;
    block.querySelector(".use").style.width = part(kv.in_use / kv.num_pages);
    block.querySelector(".cache").style.width = part(kv.cached / kv.num_pages);
    block.querySelector(".cache").style.left = part(kv.in_use / kv.num_pages);
  }

  drawPages() {
    const { kv } = this.facts;
    const room = by("pages");
    const most = room.clientWidth < 420 ? 600 : 1200;
    const per = Math.max(1, Math.ceil(kv.num_pages / most));
    const cells = Math.ceil(kv.num_pages / per);
    if (this.cells.length !== cells) {
      this.cells = new Array(cells).fill("");
      room.replaceChildren(...this.cells.map(() => element("i")));
    }
    if (this.isResized || this.sized !== cells) {
      this.sized = cells;
      const pitch = Math.max(6, Math.min(20, Math.floor(Math.sqrt((room.clientWidth * 150) / cells))));
      const gap = pitch > 9 ? 2 : 1;
      room.style.setProperty("--side", `${pitch - gap}px`);
      room.style.setProperty("--gap", `${gap}px`);
    }
    this.place(this.wanted(per, cells), Math.min(cells, Math.ceil(kv.cached / per)));
    const words = `${number(kv.in_use)} in use, ${number(kv.cached)} cached, ${number(kv.free)} free`;
    room.setAttribute("aria-label", `KV pages: ${words}`);
    const each = per > 1 ? `, ${number(per)} to a square` : "";
    setText("pages-words", `${number(kv.num_pages)} pages of ${bytes(kv.page_bytes)}${each}`);
    this.drawLegend();
  }

  // Squares that each request should have, by group. A shared page is drawn once, for this chat if it holds the page.
  wanted(per, cells) {
    const { kv, requests = [] } = this.facts;
    const wanted = new Map();
    let left = Math.min(cells, Math.ceil(kv.in_use / per));
    const own = requests.filter(({ id }) => id === this.mine);
    for (const request of [...own, ...requests.filter(({ id }) => id !== this.mine)]) {
      const { colour } = this.colours.get(request.id);
      (request.pages ?? []).forEach((pages, group) => {
        const squares = Math.min(left, Math.ceil(pages / per));
        if (squares) wanted.set(`${colour}:${group}`, squares);
        left -= squares;
      });
    }
    if (left > 0) wanted.set("other", left);
    return wanted;
  }

  place(wanted, cached) {
    const { cells } = this;
    const before = cells.slice();
    const have = new Map();
    for (const owner of cells) have.set(owner, (have.get(owner) ?? 0) + 1);
    const left = [];
    for (let at = cells.length - 1; at >= 0; at--) {
      const owner = cells[at];
      if (!owner || owner === "cached" || have.get(owner) <= (wanted.get(owner) ?? 0)) continue;
      have.set(owner, have.get(owner) - 1);
      cells[at] = "";
      left.push(at);
    }
    let next = 0;
    for (const [owner, squares] of wanted) {
      for (let lack = squares - (have.get(owner) ?? 0); lack > 0; lack--) {
        while (next < cells.length && cells[next]) next++;
        const at = next < cells.length ? next : cells.indexOf("cached");
        if (at >= 0) cells[at] = owner;
      }
    }
    this.placeCached(cached, left.reverse());
    const squares = by("pages").children;
    const mark = this.markedColour();
    cells.forEach((owner, at) => {
      if (owner !== before[at] || mark !== this.marked) squares[at].className = cellClass(owner, mark);
    });
    this.marked = mark;
  }

  // The colour of this tab's own request while it runs.
  markedColour() {
    return this.request(this.mine) ? this.colours.get(this.mine)?.colour : undefined;
  }

  // Pages that a request has just released become cached first, then the first free ones.
  placeCached(cached, left) {
    const { cells } = this;
    let have = cells.reduce((sum, owner) => sum + (owner === "cached"), 0);
    for (const at of left) if (have < cached && !cells[at]) ((cells[at] = "cached"), have++);
    for (let at = 0; at < cells.length && have < cached; at++) if (!cells[at]) ((cells[at] = "cached"), have++);
    for (let at = cells.length - 1; at >= 0 && have > cached; at--) if (cells[at] === "cached") ((cells[at] = ""), have--);
  }

  cellWords(square) {
    const owner = this.cells[[...square.parentNode.children].indexOf(square)];
    if (!owner) return "free";
    if (owner === "cached") return "cached: of a request that has ended; a prompt that begins alike starts here";
    const [colour, group] = owner.split(":");
    const id = [...this.colours].find(([, known]) => String(known.colour) === colour)?.[0] ?? "in use";
    const { groups = [] } = this.facts.kv;
    const words = id === this.mine ? `this chat (${id})` : id;
    return groups.length > 1 ? `${words}, ${groups[Number(group)]?.name}` : words;
  }

  point(target) {
    const row = target?.closest?.("tr");
    by("pages").dataset.only = row?.dataset.colour ?? "";
    for (const square of by("pages").children) {
      square.classList.toggle("other-one", Boolean(row) && !square.classList.contains(`r${Number(row.dataset.colour) % COLOURS}`));
    }
  }

  drawLegend() {
    const { kv } = this.facts;
    const own = this.request(this.mine);
    const ownPages = own ? pagesOf(own) : 0;
    const key = JSON.stringify([kv.in_use, kv.cached, kv.free, kv.groups, ownPages, this.marked]);
    if (this.legend === key) return;
    this.legend = key;
    const chips = [
      ...(ownPages ? [chip(`used mine r${this.marked % COLOURS}`, `${number(ownPages)} of this chat`)] : []),
      chip("used", `${number(kv.in_use)} in use`),
      chip("cached", `${number(kv.cached)} cached`),
      chip("", `${number(kv.free)} free`),
    ];
    const groups = kv.groups ?? [];
    if (groups.length > 1) {
      groups.forEach((group, at) => {
        chips.push(chip(`used g${at % 4}`, `${group.name}: ${number(group.in_use)} in use, ${number(group.cached)} cached`));
      });
    } else if (groups.length) chips.push(element("span", "chip", `${number(groups[0].page_tokens)} tokens a page`));
    by("legend").replaceChildren(...chips);
  }

  drawRequests() {
    const { requests = [], totals = {}, requests_left_out: leftOut = 0 } = this.facts;
    const shown = requests.slice(0, MOST_ROWS).map((request) => [request, false]);
    for (const { request } of [...this.finished.values()].slice(-4)) shown.push([request, true]);
    const body = by("requests");
    const old = new Map([...body.children].map((row) => [row.dataset.id, row]));
    const rows = shown.map(([request, isOver]) => {
      const row = old.get(request.id) ?? requestRow(request.id, this.colours.get(request.id)?.colour ?? 0);
      fillRow(row, request, isOver, request.id === this.mine);
      return row;
    });
    if (!rows.length) rows.push(old.get("none") ?? emptyRow());
    if (rows.length !== body.children.length || rows.some((row, at) => row !== body.children[at])) body.replaceChildren(...rows);
    const more = requests.length - Math.min(requests.length, MOST_ROWS) + leftOut;
    const words = `${number(totals.running ?? requests.length)} running, ${number(totals.waiting ?? 0)} waiting`;
    setText("requests-words", more ? `${words}; ${number(more)} not shown` : words);
  }

  drawThroughput() {
    const { totals } = this.facts;
    if (!totals) return;
    for (const kind of ["output", "prompt"]) {
      const rates = ratesOf(this.history, kind);
      drawSpark(by(`spark-${kind}`), rates);
      setText(`rate-${kind}`, rate(rates.at(-1)));
    }
    const queried = totals.prefix_query_tokens ?? 0;
    const facts = [
      ["requests", number(totals.requests ?? 0)],
      ["tokens written", number(totals.output_tokens ?? 0)],
      ["prefix hits", queried ? percent((totals.prefix_hit_tokens ?? 0) / queried) : "–"],
      ["preemptions", number(totals.preemptions ?? 0)],
    ];
    const { kept = 0, bytes: size = 0, limit_bytes: most = 0 } = this.facts.responses ?? {};
    if (kept) facts.push(["kept responses", `${number(kept)}, ${bytes(size)}`, `of /v1/responses; at most ${bytes(most)}`]);
    const key = facts.join();
    if (this.totals === key) return;
    this.totals = key;
    by("totals").replaceChildren(...facts.map(([name, value, title]) => factNode(name, value, title)));
  }
}

// ---- device memory

function ownersOf(memory) {
  const rows = memory.rows.filter((row) => row.phases.includes("serve"));
  const owners = rows.map((row) => ({ ...row, size: row.held_bytes ?? row.planned_bytes }));
  if (memory.unaccounted_bytes > 0) {
    const reason = "taken from the device, but no owner of the plan has it";
    owners.push({ owner: "unaccounted", size: memory.unaccounted_bytes, planned_bytes: 0, held_bytes: memory.unaccounted_bytes, reason });
  }
  return owners.sort((one, other) => other.size - one.size);
}

// The colour depends only on the name.
function ownerClass(name) {
  const known = OWNERS.indexOf(name);
  const letters = [...name].reduce((sum, letter) => sum + letter.codePointAt(0), 0);
  return `o-${name.replace(/\W+/g, "-")} p${known >= 0 ? known : 8 + (letters % 4)}`;
}

function drawHeadline(memory) {
  const share = percent(memory.planned_bytes / memory.budget_bytes);
  setText("held-words", `${share} of the budget is planned, the rest is left alone`);
  by("held-words").title = memory.budget_reason ?? "";
}

function drawBlocks(memory) {
  const room = by("blocks");
  const owners = ownersOf(memory).filter(({ size }) => size > 0);
  const [wide, high] = [room.clientWidth || 1, room.clientHeight || 1];
  const places = squarify(owners.map(({ size }) => size), wide, high);
  const small = [];
  const blocks = owners.map(({ owner, size, reason }, at) => {
    const [x, y, w, h] = places[at];
    const block = element("div", `block ${ownerClass(owner)}`);
    Object.assign(block.style, { left: part(x / wide), top: part(y / high), width: part(w / wide), height: part(h / high) });
    block.title = `${owner}: ${bytes(size)}\n${reason}`;
    if (owner === "kv pages") block.append(element("span", "use"), element("span", "cache"));
    if (!hasRoom(owner, w, h)) small.push(chip(`swatch ${ownerClass(owner)}`, `${owner} ${bytes(size)}`));
    else block.append(element("b", "", owner), element("small", "", bytes(size)));
    return block;
  });
  room.replaceChildren(...blocks);
  by("small-owners").replaceChildren(...small);
  room.setAttribute("aria-label", `Memory to scale: ${owners.map(({ owner, size }) => `${owner} ${bytes(size)}`).join(", ")}`);
}

// True if name and size fit into a block; a name may take a line for each of its words.
function hasRoom(name, width, height) {
  const words = name.split(" ");
  const isLong = width < 7.6 * name.length + 20;
  const needed = isLong ? Math.max(...words.map((word) => word.length), 8) : 8;
  return width > 7.6 * needed + 20 && height > 40 + (isLong ? 17 * (words.length - 1) : 0);
}

function chip(kind, words) {
  return element("span", "chip", element("i", kind), element("span", "", words));
}

// Squarified treemap: rows along the shorter side, each closed when one more block would make its worst block longer.
function squarify(sizes, width, height) {
  const total = sizes.reduce((sum, size) => sum + size, 0) || 1;
  const areas = sizes.map((size) => (size / total) * width * height);
  const places = [];
  let [x, y, w, h] = [0, 0, width, height];
  let at = 0;
  while (at < areas.length) {
    const side = Math.min(w, h) || 1;
    let end = at + 1;
    while (end < areas.length && worst(areas.slice(at, end + 1), side) <= worst(areas.slice(at, end), side)) end++;
    const row = areas.slice(at, end);
    const thick = row.reduce((sum, area) => sum + area, 0) / side;
    let along = 0;
    for (const area of row) {
      const long = area / (thick || 1);
      places.push(w >= h ? [x, y + along, thick, long] : [x + along, y, long, thick]);
      along += long;
    }
    if (w >= h) [x, w] = [x + thick, w - thick];
    else [y, h] = [y + thick, h - thick];
    at = end;
  }
  return places;
}

function worst(row, side) {
  const sum = row.reduce((total, area) => total + area, 0) || 1;
  return Math.max((side * side * Math.max(...row)) / (sum * sum), (sum * sum) / (side * side * (Math.min(...row) || 1)));
}

function drawOwners(memory) {
  const owners = ownersOf(memory);
  const most = Math.max(...owners.map((row) => Math.max(row.planned_bytes, row.size)), 1);
  const gone = memory.rows.filter((row) => !row.phases.includes("serve"));
  const rows = owners.map((row) => ownerRow(row, most, ownerClass(row.owner)));
  for (const row of gone) rows.push(ownerRow({ ...row, size: 0 }, most, "gone"));
  by("owners").replaceChildren(...rows);
}

// Planned, held, measured: three numbers that should agree.
function drawAccounts(memory, coreBytes) {
  const { planned_bytes: planned, held_bytes: held } = memory;
  const isDevice = memory.measured_bytes != null;
  const measured = memory.measured_bytes ?? coreBytes;
  const facts = [
    ["planned", bytes(planned), "what every owner may take while serving"],
    ["held", bytes(held), "what owners have taken"],
  ];
  if (measured != null) {
    const off = measured - planned;
    const who = isDevice ? "what the device says this engine took" : "resident memory of the core’s process";
    const why = off < 0 ? "less than planned: bounds, and pages that were not touched yet" : "more than planned";
    facts.push(["measured", bytes(measured), who], ["against the plan", `${off < 0 ? "−" : "+"}${bytes(Math.abs(off))}`, why]);
  } else facts.push(["measured", "–", "not measured on this device"]);
  facts.push(["budget", bytes(memory.budget_bytes), memory.budget_reason ?? ""]);
  by("accounts").replaceChildren(...facts.map(([name, value, title]) => factNode(name, value, title)));
}

function factNode(name, value, title = "") {
  const fact = element("div", "", element("dt", "", name), element("dd", "", value));
  fact.title = title;
  return fact;
}

function ownerRow(row, most, kind) {
  const planned = element("span", "planned");
  planned.style.width = part(row.planned_bytes / most);
  const held = element("span", `held ${kind}`);
  held.style.width = part((row.held_bytes ?? 0) / most);
  const bar = element("td", "bar-cell", element("div", "track", planned, held));
  const words = row.held_bytes == null ? "a bound" : bytes(row.held_bytes);
  const cells = [row.planned_bytes ? bytes(row.planned_bytes) : "–", kind === "gone" ? "freed" : words];
  const name = rowHead(`swatch ${kind}`, row.owner);
  const tr = element("tr", kind === "gone" ? "gone" : "", name, bar, ...cells.map((text) => element("td", "", text)));
  tr.title = row.reason;
  return tr;
}

function rowHead(kind, words) {
  const head = element("th", "", element("i", kind), element("span", "", words));
  head.scope = "row";
  return head;
}

// ---- pages and requests

function cellClass(owner, mark) {
  if (!owner || owner === "cached") return owner;
  if (owner === "other") return "used";
  const [colour, group] = owner.split(":").map(Number);
  return `used r${colour % COLOURS} g${group % 4}${colour === mark ? " mine" : ""}`;
}

// The second completion of a request has a row of its own.
function named(request) {
  return request.index ? { ...request, id: `${request.id} #${request.index + 1}` } : request;
}

function requestRow(id, colour) {
  const name = rowHead(`swatch r${colour % COLOURS}`, shortId(id));
  name.title = id;
  const row = element("tr", "", name, ...["state", "", "", "", ""].map((kind) => element("td", kind)));
  Object.assign(row.dataset, { id, colour });
  return row;
}

function pagesOf(request) {
  return (request.pages ?? []).reduce((sum, value) => sum + value, 0);
}

function fillRow(row, request, isOver, isMine) {
  row.classList.toggle("over", isOver);
  row.classList.toggle("mine", isMine);
  const name = row.firstChild.lastChild;
  const called = isMine ? "this chat" : shortId(request.id);
  if (name.textContent !== called) name.textContent = called;
  const pages = pagesOf(request);
  const words = [
    isOver ? "finished" : request.state,
    `${number(request.prompt_tokens ?? 0)} + ${number(request.output_tokens ?? 0)}`,
    isOver ? "0" : number(pages),
    age(request.age_seconds ?? 0),
    request.tokens_per_second ? rate(request.tokens_per_second) : "–",
  ];
  words.forEach((text, at) => {
    const cell = row.children[at + 1];
    if (cell.textContent !== text) cell.textContent = text;
  });
  row.children[1].dataset.state = words[0];
}

function emptyRow() {
  const cell = element("td", "", "No request runs. Every page is free or cached.");
  cell.colSpan = 6;
  const row = element("tr", "empty", cell);
  row.dataset.id = "none";
  return row;
}

function shortId(id) {
  return id.length > 16 ? `${id.slice(0, 9)}…${id.slice(-5)}` : id;
}

// ---- throughput

function totalAt(history, time, kind) {
  if (time <= history[0].time) return history[0][kind];
  let low = 0;
  let high = history.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (history[middle].time <= time) low = middle;
    else high = middle;
  }
  const [from, to] = [history[low], history[high]];
  const share = to.time > from.time ? Math.min(1, (time - from.time) / (to.time - from.time)) : 1;
  return from[kind] + share * (to[kind] - from[kind]);
}

function ratesOf(history, kind) {
  const now = history.at(-1).time;
  const rates = [];
  for (let second = SPAN_SECONDS; second > 0; second--) {
    rates.push(totalAt(history, now - second + 1, kind) - totalAt(history, now - second, kind));
  }
  return rates;
}

function drawSpark(svg, rates) {
  const top = Math.max(...rates, 1e-9);
  const points = rates.map((value, at) => `${((at / (rates.length - 1)) * 240).toFixed(1)},${(46 - (value / top) * 42).toFixed(1)}`);
  svg.querySelector(".line").setAttribute("d", `M${points.join("L")}`);
  svg.querySelector(".area").setAttribute("d", `M0,48L${points.join("L")}L240,48Z`);
}

// ---- text

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1024;
    at++;
  }
  const digits = at === 0 ? 0 : value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[at]}`;
}

function number(value) {
  return Math.round(value).toLocaleString("en");
}

function percent(share) {
  const value = 100 * (Number.isFinite(share) ? share : 0);
  return `${value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1)}%`;
}

function part(share) {
  return `${(100 * (Number.isFinite(share) ? share : 0)).toFixed(3)}%`;
}

function age(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

function count(value, one, many) {
  return `${number(value)} ${value === 1 ? one : many}`;
}

function setText(id, words) {
  if (by(id).textContent !== words) by(id).textContent = words;
}
