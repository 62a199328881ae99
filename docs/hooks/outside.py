"""Publishes files outside of docs/ that pages link to (recipes, configs, tests) under source/, so links work."""

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".json": "json", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file that is linked, and for what those link to in their turn."""
    pages = [file for file in files if file.is_documentation_page() and file.abs_src_path]
    left = [Path(str(file.abs_src_path)) for file in pages] + list(_of_nav(config))
    seen: set[Path] = set()
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.is_relative_to(DOCS):
            files.append(File.generated(config, _name(path), content=_content(path)))
        if path.suffix == ".md":
            left += [found for _, found in _links(path.read_text(encoding="utf-8"), path)]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files outside of docs/, and all links of such files, are those of the site."""
    path = _path(page.file.src_uri)
    if path.suffix != ".md" or page.file.src_uri.startswith("reference/"):
        return markdown
    for link, found in {*_links(markdown, path)}:
        name = _name(found)
        if not found.is_relative_to(DOCS) or not path.is_relative_to(DOCS):
            relative = get_relative_url(name, page.file.src_uri)
            markdown = re.sub(rf"(?<=\]\(){re.escape(link)}(?=[)#])", relative, markdown)
    return markdown


def _of_nav(config: MkDocsConfig) -> Iterator[Path]:
    for section in config.nav or []:
        for entry in next(iter(section.values())):
            (name,) = entry.values()
            if name.startswith("source/"):
                yield _path(name)


def _path(name: str) -> Path:
    """The file that a page of the site is of."""
    if not name.startswith("source/"):
        return DOCS / name
    path = ROOT / name.removeprefix("source/")
    return path if path.exists() else path.with_suffix("")


def _name(path: Path) -> str:
    """The page of the site that shows a file."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = f"source/{path.relative_to(ROOT).as_posix()}"
    return name if path.suffix == ".md" else f"{name}.md"


def _links(markdown: str, path: Path) -> Iterator[tuple[str, Path]]:
    """Relative links to files that exist outside of docs/, or from there."""
    for link in _LINK.findall(markdown):
        found = (path.parent / link).resolve()
        if found.is_file() and found.is_relative_to(ROOT):
            if found.is_relative_to(DOCS) and path.is_relative_to(DOCS):
                continue
            yield link, found


def _content(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    language = _LANGUAGES.get(path.suffix, "text")
    return f"# {path.relative_to(ROOT).as_posix()}\n\n````{language}\n{text}\n````\n"
