"""A page in one file: style and script inside, dark and light, nothing loaded from anywhere, every text escaped; no torch."""

import os
from html import escape
from pathlib import Path

from holdfast.errors import ConfigError, shown

VOID = ("meta",)
DOCTYPE = b"<!doctype html>"
PALETTE = ("#74aee8", "#74c69d", "#f4b860", "#d9a0cf", "#86d2dd", "#e3d36b", "#e8998d", "#b7a9e6")
"""One colour an owner, light enough for black letters in both themes, and told apart by the colour-blind."""
STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#1b1f24;--quiet:#5b6570;--line:#d7dce1;--empty:#eceff2;--mark:#0a7d45}
@media(prefers-color-scheme:dark){:root{--page:#14171a;--text:#e6e9ec;--quiet:#98a2ad;--line:#343a41;--empty:#22272c;--mark:#5fd39a}}
body{margin:2rem auto;max-width:68rem;padding:0 1rem;background:var(--page);color:var(--text);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}p{margin:.4rem 0}.quiet{color:var(--quiet)}
table{border-collapse:collapse;width:100%}th,td{padding:.25rem .6rem .25rem 0;text-align:left;vertical-align:top}
th{color:var(--quiet);font-weight:500;border-bottom:1px solid var(--line)}td{border-bottom:1px solid var(--line)}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.total td{font-weight:600}
.not-yet{opacity:.55}.smallest td:first-child{font-weight:600;color:var(--mark)}
svg{display:block;width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#14171a;pointer-events:none}
svg .axis{fill:var(--quiet);font-size:12px}svg .value{fill:var(--text);font-size:12px}
svg rect{stroke:var(--page);stroke-width:.6}svg g g:hover rect{stroke:var(--text);stroke-width:1.5}
svg .planned rect{fill-opacity:.35}svg .planned text,svg .free text{fill:var(--text)}.free{fill:var(--empty)}.unknown{fill:#9aa3ac}
.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.5em;border-radius:2px}
.swatch.free{background:var(--empty)}.swatch.unknown{background:#9aa3ac}
#readout{min-height:1.5em;font-variant-numeric:tabular-nums}code{font:13px ui-monospace,monospace}
""" + "".join(f".c{i}{{fill:{colour}}}.swatch.c{i}{{background:{colour}}}\n" for i, colour in enumerate(PALETTE))
SCRIPT = """
const out = document.getElementById("readout");
const tell = event => { const part = event.target.closest("g"); const title = part && part.querySelector("title");
  if (out && title) out.textContent = title.textContent; };
for (const picture of document.querySelectorAll("svg")) {
  picture.addEventListener("pointerover", tell); }
"""
ALLOWED = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Html:
    """An element. What is no markup yet is escaped; `class_` writes class, and underscores are hyphens."""
    told = "".join(f' {key.rstrip("_").replace("_", "-")}="{_safe(str(value))}"' for key, value in attributes.items())
    if name in VOID:
        return Html(f"<{name}{told}>")
    return Html(f"<{name}{told}>{''.join(map(_markup, children))}</{name}>")


def page(title: str, *body: Html) -> str:
    """The whole file."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=ALLOWED),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    script = tag("script", Html(SCRIPT))
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', *body, script), lang='en')}\n"


def table(headings: tuple[str, ...], rows: list[tuple[str, tuple[str, ...]]], num_numbers: int) -> Html:
    """Rows, each with its class; the columns after the first are numbers, as many as are said."""

    def cells(kind: str, row: tuple[str, ...]) -> tuple[Html, ...]:
        return tuple(
            tag(kind, cell, class_="number") if 1 <= column <= num_numbers else tag(kind, cell)
            for column, cell in enumerate(row)
        )

    body = (tag("tr", *cells("td", row), **({"class_": name} if name else {})) for name, row in rows)
    return tag("table", tag("thead", tag("tr", *cells("th", headings))), tag("tbody", *body))


def page_file(file: str, option: str) -> Path:
    """The path of a page that is to be written, refused before any work is done for it."""
    path = Path(file)
    try:
        path = path.expanduser()
        wrong = "it is no name" if not file.strip() or "\0" in file else "it is a folder" if path.is_dir() else ""
        if not wrong and not path.absolute().parent.is_dir():
            wrong = "its folder does not exist"
        elif not wrong and path.exists() and not _is_page(path):
            wrong = "a file that is no page lies there"
        elif not wrong and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            wrong = "it may not be written"
    except (OSError, RuntimeError) as error:
        wrong = getattr(error, "strerror", None) or str(error)
    if wrong:
        raise ConfigError(f"{option} {shown(file)} was asked", wrong, f"write {option} page.html")
    return path


def _is_page(path: Path) -> bool:
    """Whether a file may be replaced by a page: it is one, or empty, or no plain file."""
    if not path.is_file():
        return True
    with path.open("rb") as file:
        start = file.read(len(DOCTYPE))
    return not start or start.lower() == DOCTYPE


def _markup(child: str) -> str:
    return child if isinstance(child, Html) else _safe(child)


def _safe(text: str) -> str:
    return escape("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text))
