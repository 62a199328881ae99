"""The site: built strictly, whole, asking nobody else for anything; its links and the repository's resolve."""

import contextlib
import io
import logging
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer
import yaml
from doc_pages import PAGES
from launching import ROOT
from markdown_it import MarkdownIt
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import dit_lora
from dit_lora.cli.app import app
from dit_lora.config.load import build_recipe_schema

DOCS = ROOT / "docs"
_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
_COUNTED = {"li": "list_item_open", "pre": "fence", "table": "table_open", "h2": None, "h3": None}


class Built(HTMLParser):
    """One page of the site: what it fetches, links to, can be linked to, and how its article is made up."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.counts = dict.fromkeys(_COUNTED, 0)
        self._article = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self._article = self._article or tag == "article"
        if self._article and tag in self.counts:
            self.counts[tag] += 1
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        self.classes |= set(attributes.get("class", "").split())
        if tag in _FETCHED and _FETCHED[tag] in attributes:
            self.fetched.append(attributes[_FETCHED[tag]])
        elif tag == "link" and attributes.get("rel") != "canonical" and "href" in attributes:
            self.fetched.append(attributes["href"])
        elif tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])

    def handle_endtag(self, tag: str) -> None:
        self._article = self._article and tag != "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does it: a warning of MkDocs is an error."""
    folder, log = tmp_path_factory.mktemp("site"), io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setLevel(logging.WARNING)
    logging.getLogger("mkdocs").addHandler(handler)
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    with contextlib.suppress(Abort):
        build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    logging.getLogger("mkdocs").removeHandler(handler)
    assert log.getvalue() == ""
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Built]:
    built = {path: Built(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(built) >= len(list(DOCS.rglob("*.md")))
    return built


def test_every_page_has_a_place_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert {
        str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if f": {path.relative_to(DOCS)}\n" not in text
    } == set()


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Built]) -> None:
    for path, page in pages.items():
        assert page.fetched, path
        assert [source for source in page.fetched if urlsplit(source).netloc] == [], path
        assert "mermaid" not in page.classes, f"{path}: Material loads mermaid from a CDN"
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text()), style


def test_search_works_in_pages_opened_from_the_disk(site: Path, pages: dict[Path, Built]) -> None:
    """Browsers refuse to fetch an index and to start a worker there: both come as scripts."""
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    assert "assets/iframe-worker.js" in pages[site / "index.html"].fetched
    assert (site / "assets" / "iframe-worker.js").is_file()


def test_every_link_and_anchor_of_the_site_resolves(pages: dict[Path, Built]) -> None:
    num_links, broken = 0, []
    for path, page in pages.items():
        for link in {*page.links, *page.fetched}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            num_links += 1
            is_page = target in pages and (not parts.fragment or parts.fragment in pages[target].anchors)
            if not (is_page or (target.is_file() and not parts.fragment)):
                broken.append(f"{path.name}: {link}")
    assert not broken
    assert num_links > 1000


def test_every_link_and_anchor_resolves_in_the_repository_too() -> None:
    """As GitHub shows README and pages; the references exist on the site alone."""
    links = [(page, link) for page in PAGES for link in _links(page)]
    broken = []
    for page, link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        generated = target.is_relative_to(DOCS / "reference") and page.is_relative_to(DOCS)
        if not generated and not (target.exists() and (not anchor or anchor in _slugs(target))):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken
    assert len(links) > 60


def _links(page: Path) -> Iterator[str]:
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        for child in token.children or ():
            link = child.attrGet("href") or child.attrGet("src")
            if link and not urlsplit(str(link)).scheme:
                yield unquote(str(link))


def _slugs(page: Path) -> set[str]:
    """Anchors of headings, by GitHub's rule."""
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    titles = [
        "".join(child.content for child in tokens[position + 1].children or ())
        for position, token in enumerate(tokens)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_the_site_shows_what_commonmark_means(page: Path, site: Path) -> None:
    """Python-Markdown wants a blank line before a list and four blanks within: a page must read the same in both."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    expected = {
        tag: sum(token.type == kind if kind else token.type == "heading_open" and token.tag == tag for token in tokens)
        for tag, kind in _COUNTED.items()
    }
    name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
    assert Built(site / page.relative_to(DOCS).parent / name).counts == expected


def test_the_references_have_every_key_verb_option_and_name(site: Path) -> None:
    schema = build_recipe_schema()
    recipe = (site / "reference" / "recipe.html").read_text()
    sections = [schema, *schema["$defs"].values()]
    keys = {key for section in sections for key in section.get("properties", {})}
    assert len(keys) > 90
    assert {key for key in keys if f"<code>{key}</code>" not in recipe} == set()

    commands = (site / "reference" / "commands.html").read_text()
    names = set(_verbs_and_options(typer.main.get_command(app), ""))
    assert len(names) > 80
    assert {word for word in names if not re.search(rf"<code>{re.escape(word)}[ <,]", commands)} == set()

    python = Built(site / "reference" / "python.html").anchors
    public = [name for name in dit_lora.__all__ if not name.startswith("__")]
    assert {n for n in public if not any(a.endswith(f".{n}") for a in python)} == set()


def _verbs_and_options(command: object, path: str) -> Iterator[str]:
    for parameter in getattr(command, "params", ()):
        yield from (name for name in parameter.opts if name.startswith("--"))
    for name, inner in getattr(command, "commands", {}).items():
        yield f"dit-lora {path}{name}".strip()
        yield from _verbs_and_options(inner, f"{path}{name} ")


def test_the_navigation_leads_newcomers_first() -> None:
    text = re.sub(r"!!python\S+ \{.*\}", "null", (ROOT / "mkdocs.yml").read_text())
    sections = [next(iter(section)) for section in yaml.safe_load(text)["nav"]]
    assert sections[:3] == ["Start", "Train", "Guard"]
    assert sections[-1] == "Develop"
