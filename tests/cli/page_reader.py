"""Reads a page as a strict browser would: balanced elements, known text, nothing from elsewhere."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link"}


@dataclass
class Element:
    """One element with what is in it."""

    name: str
    attributes: dict[str, str]
    children: "list[Element]" = field(default_factory=list)
    own_text: str = ""

    @property
    def text(self) -> str:
        """All text, of inner elements too."""
        return self.own_text + "".join(child.text for child in self.children)

    def all(self, name: str) -> "list[Element]":
        """Every element of a name below this one."""
        found = [child for child in self.children if child.name == name]
        return found + [inner for child in self.children for inner in child.all(name)]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.stack = [Element("document", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice: {names}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.stack[-1].children.append(element)
        if tag not in VOID:
            self.stack.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack[-1].name == tag, f"</{tag}> closes <{self.stack[-1].name}>"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        self.stack[-1].own_text += data


def read_page(text: str) -> Element:
    """The document, held to what every page of ours keeps."""
    assert text.startswith("<!DOCTYPE html>"), text[:40]
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert [element.name for element in reader.stack] == ["document"], "an element is not closed"
    document = reader.stack[0]
    for element in _everything(document):
        assert element.name not in {"link", "img", "iframe", "object", "base"}, f"{element.name} loads something"
        for name, value in element.attributes.items():
            assert not name.startswith("on"), f"{element.name} has a handler {name}"
            assert name not in {"src", "href", "xlink:href"}, f"{element.name} points to {value}"
    policy = [meta for meta in document.all("meta") if meta.attributes.get("http-equiv") == "Content-Security-Policy"]
    assert policy, "a page says that it loads nothing"
    assert "default-src 'none'" in policy[0].attributes["content"]
    style = document.all("style")[0].text
    assert "prefers-color-scheme:dark" in style
    assert "url(" not in style
    assert "@import" not in style
    return document


def _everything(element: Element) -> "list[Element]":
    return [element, *(inner for child in element.children for inner in _everything(child))]
