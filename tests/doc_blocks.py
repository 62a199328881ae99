"""Code blocks of a page, with what the comment above each says about it (docs/contributing.md)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

LANGUAGES = ("bash", "console", "python", "text", "yaml", "json")
COMMENTS = ("file", "exit code", "not run", "example")
_COMMENT = re.compile(r"<!--\s*(?P<what>[a-z ]+?)\s*:\s*(?P<value>.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: `comment` is ("file", "train.json"), ("not run", "needs two nodes") or nothing."""

    page: Path
    line: int
    heading: int
    """The line of the heading that it is under."""
    language: str
    text: str
    comment: tuple[str, str] | None

    def says(self, what: str) -> str | None:
        return self.comment[1] if self.comment and self.comment[0] == what else None

    def __str__(self) -> str:
        return f"{self.page.name}, line {self.line}"


def blocks(page: Path) -> list[Block]:
    """All blocks of a page in order; an `AssertionError` names one that the convention does not know."""
    return list(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    heading, last_comment = 0, None
    for token in MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8")):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "heading_open":
            heading = line
        assert token.type != "code_block", f"{page}, line {line}: indented code; use ``` and a language"
        if token.type == "fence":
            yield _block(page, line, heading, token, last_comment)
        last_comment = token if token.type == "html_block" else None


def _block(page: Path, line: int, heading: int, fence: Token, above: Token | None) -> Block:
    location = f"{page}, line {line}"
    language = fence.info.strip()
    assert language in LANGUAGES, f"{location}: language {language!r}; known: {', '.join(LANGUAGES)}"
    comment = None
    if above is not None and above.content.lstrip().startswith("<!--"):
        match = _COMMENT.fullmatch(above.content.strip())
        assert match, f"{location}: the comment above has to read <!-- {' | '.join(COMMENTS)}: ... -->"
        assert match["what"] in COMMENTS, f"{location}: comment {match['what']!r}; known: {COMMENTS}"
        comment = match["what"], match["value"]
    return Block(page, line, heading, language, fence.content, comment)


_SPACE_OR_FIGURE = re.compile(r"\s+|\b[0-9a-f]*\d[0-9a-f]*(?:\.\d+)?(?:e[+-]?\d+)?\b")
_ANY_FIGURE = r"(?=[a-f]*\d)[0-9a-f]+(?:\.\d+)?(?:e[+-]?\d+)?"


def missing(expected: str, output: str) -> str | None:
    """The first piece of `expected` that `output` does not have where it should; None if it has them all.

    White space is one blank, figures and digests match any other, and `...` matches anything.
    """
    start, flat = 0, " ".join(output.split())
    for piece in re.split(r"\.{3,}", " ".join(expected.split())):
        if not piece.strip():
            continue
        match = re.compile(_pattern(piece.strip())).search(flat, start)
        if match is None:
            return piece.strip()
        start = match.end()
    return None


def _pattern(piece: str) -> str:
    pattern, start = "", 0
    for match in _SPACE_OR_FIGURE.finditer(piece):
        pattern += re.escape(piece[start : match.start()])
        pattern += r"\s*" if match[0].isspace() else _ANY_FIGURE
        start = match.end()
    return pattern + re.escape(piece[start:])
