// Markdown, the part of it that models write, as DOM nodes. Text is only ever set as text: no answer can become markup.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const TABLE_RULE = /^\s*\|?[\s:|-]*-[\s:|-]*$/;

export function element(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

// A block is {kind, lines, ...}; if its source is unchanged, its node stays.
export function split(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const start = at;
    const line = lines[at];
    const fence = FENCE.exec(line);
    let block;
    if (!line.trim()) {
      at++;
      continue;
    } else if (fence) {
      at++;
      while (at < lines.length && !closes(lines[at], fence[1])) at++;
      block = { kind: "code", language: fence[2], lines: lines.slice(start + 1, at) };
      at++;
    } else if (HEADING.test(line)) {
      block = { kind: "heading", lines: [line] };
      at++;
    } else if (RULE.test(line)) {
      block = { kind: "rule", lines: [] };
      at++;
    } else if (ITEM.test(line)) {
      at = endOfList(lines, at + 1);
      block = { kind: "list", lines: lines.slice(start, at) };
    } else if (QUOTE.test(line)) {
      while (at < lines.length && QUOTE.test(lines[at])) at++;
      block = { kind: "quote", lines: lines.slice(start, at) };
    } else if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("|") && TABLE_RULE.test(lines[at + 1])) {
      at += 2;
      while (at < lines.length && lines[at].includes("|")) at++;
      block = { kind: "table", lines: lines.slice(start, at) };
    } else {
      at++;
      while (at < lines.length && lines[at].trim() && !begins(lines[at])) at++;
      block = { kind: "paragraph", lines: lines.slice(start, at) };
    }
    block.source = lines.slice(start, at).join("\n");
    blocks.push(block);
  }
  return blocks;
}

function closes(line, fence) {
  const words = line.trim();
  return words.length >= fence.length && words === fence[0].repeat(words.length);
}

function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || QUOTE.test(line) || RULE.test(line);
}

function endOfList(lines, at) {
  for (; at < lines.length; at++) {
    if (ITEM.test(lines[at]) && !RULE.test(lines[at])) continue;
    if (lines[at].trim()) {
      if (/^\s/.test(lines[at]) || (lines[at - 1].trim() && !begins(lines[at]))) continue;
      break;
    }
    const next = lines[at + 1] ?? "";
    if (!ITEM.test(next) && !/^\s{2,}\S/.test(next)) break;
  }
  return at;
}

// Shows `text` in `box`. Unchanged blocks stay: a stream costs only what it adds, and a selection survives.
export function show(box, text) {
  const blocks = split(text);
  const shown = box.sources ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && shown[same] === blocks[same].source) same++;
  while (box.childNodes.length > same) box.lastChild.remove();
  for (const block of blocks.slice(same)) box.append(NODES[block.kind](block));
  box.sources = blocks.map((block) => block.source);
}

const NODES = {
  code: codeNode,
  heading: ({ lines }) => {
    const [, marks, words] = HEADING.exec(lines[0]);
    return inline(element(`h${Math.min(6, marks.length + 2)}`), words.replace(/\s+#+\s*$/, ""));
  },
  rule: () => element("hr"),
  list: ({ lines }) => listNode(lines),
  quote: ({ lines }) => {
    const quote = element("blockquote");
    show(quote, lines.map((line) => QUOTE.exec(line)[1]).join("\n"));
    return quote;
  },
  table: ({ lines }) => tableNode(lines),
  paragraph: ({ lines }) => inline(element("p"), lines.join("\n")),
};

function codeNode({ language, lines }) {
  const copy = element("button", "quiet", "Copy");
  copy.type = "button";
  copy.dataset.copy = "code";
  const pre = element("pre", "", element("code", "", lines.join("\n")));
  pre.tabIndex = 0;
  return element("figure", "code", element("figcaption", "", element("span", "", language || "code"), copy), pre);
}

// An item may contain further lines and nested items, which are indented deeper than its mark.
function listNode(lines) {
  const first = ITEM.exec(lines[0]);
  const isOrdered = /\d/.test(first[2]);
  const list = element(isOrdered ? "ol" : "ul");
  if (isOrdered) list.start = Number.parseInt(first[2], 10);
  const depth = first[1].length;
  let inner = [];
  let words = null;
  const close = () => {
    if (words === null) return;
    const item = inline(element("li"), words);
    const rest = unindent(inner);
    if (rest.trim()) {
      const room = element("div");
      show(room, rest);
      item.append(...room.childNodes);
    }
    list.append(item);
  };
  for (const line of lines) {
    const mark = ITEM.exec(line);
    if (mark && mark[1].length <= depth + 1) {
      close();
      words = mark[3];
      inner = [];
    } else if (inner.length || mark || !line.trim()) inner.push(line);
    else words += `\n${line.trim()}`;
  }
  close();
  return list;
}

function unindent(lines) {
  const depths = lines.filter((line) => line.trim()).map((line) => line.search(/\S/));
  const depth = depths.length ? Math.min(...depths) : 0;
  return lines.map((line) => line.slice(depth)).join("\n");
}

function tableNode(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => element("tr", "", ...cells(line).map((cell) => inline(element(tag), cell)));
  const body = element("tbody", "", ...lines.slice(2).map((line) => row(line, "td")));
  const room = element("div", "table-room", element("table", "", element("thead", "", row(lines[0], "th")), body));
  room.tabIndex = 0;
  return room;
}

// Code, strong, emphasis and links inside a line. Every step moves forward, so this ends.
const MARKS = /(`+)|(\*\*|__)|([*_])|\[|(https?:\/\/)/g;

function inline(parent, text, depth = 0) {
  let rest = 0;
  const plain = (until) => {
    if (until > rest) parent.append(text.slice(rest, until));
  };
  let at = 0;
  while (at < text.length) {
    MARKS.lastIndex = at;
    const mark = MARKS.exec(text);
    if (!mark) break;
    const begin = mark.index;
    const found = depth < 8 ? part(text, begin, mark, depth) : null;
    if (found) {
      plain(begin);
      parent.append(found.node);
      rest = at = found.end;
    } else at = begin + mark[0].length;
  }
  plain(text.length);
  return parent;
}

function part(text, begin, mark, depth) {
  const after = begin + mark[0].length;
  if (mark[1]) {
    const end = text.indexOf(mark[1], after);
    if (end < 0) return null;
    return { node: element("code", "", text.slice(after, end).replace(/\n/g, " ")), end: end + mark[1].length };
  }
  if (mark[2] || mark[3]) {
    const sign = mark[0];
    const isInWord = sign[0] === "_" && /\w/.test(text[begin - 1] ?? " ");
    const end = text.indexOf(sign, after + 1);
    if (end < 0 || isInWord || /\s/.test(text[after]) || /\s/.test(text[end - 1])) return null;
    const inside = text.slice(after, end);
    return { node: inline(element(mark[2] ? "strong" : "em"), inside, depth + 1), end: end + sign.length };
  }
  if (mark[4]) return bareLink(text, begin);
  const middle = text.indexOf("](", after);
  const end = middle < 0 ? -1 : text.indexOf(")", middle);
  if (end < 0 || text.slice(after, middle).includes("\n")) return null;
  const address = text.slice(middle + 2, end).split(/\s/)[0];
  return isWeb(address) ? { node: link(address, text.slice(after, middle)), end: end + 1 } : null;
}

function bareLink(text, begin) {
  let end = begin;
  while (end < text.length && !/[\s<>"'`)\]]/.test(text[end])) end++;
  while (/[.,;:!?*_]/.test(text[end - 1])) end--;
  const address = text.slice(begin, end);
  return isWeb(address) && address.length > 10 ? { node: link(address, address), end } : null;
}

function isWeb(address) {
  return /^https?:\/\/[^\s]+$/.test(address);
}

function link(address, words) {
  const node = element("a", "", words);
  node.href = address;
  node.rel = "noopener noreferrer nofollow";
  node.target = "_blank";
  return node;
}
