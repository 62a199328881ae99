"""A page of ours as its reader meets it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Text, attributes, data and balance of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[Any] = []
        self.open: list[str] = []
        self.feed(self.source)
        self.close()
        assert self.open == [], "a tag is left open"
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)
        elif self.tags[-1][1].get("type") == "application/json":
            self.data.append(json.loads(data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def section(self, heading: str) -> str:
        """The text below a heading of the second order, up to the next."""
        part = self.source.partition(f">{heading}</h2>")[2].partition("<h2")[0]
        return " ".join(re.sub(r"<[^>]*>", " ", part).split())
