"""The pages stay short, and are written plainly."""

from pathlib import Path

import pytest
from launching import ROOT
from page_language import count_words, extract_prose, find_mannerisms

PAGES = sorted((ROOT / "docs").glob("*.md"))
MAX_WORDS = 45_000
MAX_WORDS_PER_PAGE = 3_500
MAX_README_WORDS = 1_100
MAX_MANNERISMS_PER_1000_WORDS = 1.5


def test_the_pages_have_few_words() -> None:
    words = {page.name: count_words(page.read_text(encoding="utf-8")) for page in PAGES}
    assert len(words) > 25
    assert sum(words.values()) <= MAX_WORDS, words
    assert {name: count for name, count in words.items() if count > MAX_WORDS_PER_PAGE} == {}
    assert count_words((ROOT / "README.md").read_text(encoding="utf-8")) <= MAX_README_WORDS


def test_the_pages_have_few_mannerisms() -> None:
    num_words, found = 0, []
    for page in [*PAGES, ROOT / "README.md"]:
        text = page.read_text(encoding="utf-8")
        num_words += count_words(extract_prose(text))
        found += [f"{page.name}:{line}: {kind}: {words}" for line, kind, words in find_mannerisms(text)]
    assert 1000 * len(found) / num_words <= MAX_MANNERISMS_PER_1000_WORDS, "\n".join(found)


PAGE = """# What is no page of its own

Of three files one is read, and what is read is anew. It has one scale a row.

```bash
echo whatever is alone
```

<!-- example: the house -->
Which one? What is it? `beside` is code, [blame](beside.md) is the text of a link.

| what it does | a verdict |
|---|---|
| By hand | of course |
"""


def test_mannerisms_are_found_in_prose_only(tmp_path: Path) -> None:
    assert sorted(find_mannerisms(PAGE)) == [
        (3, "a file a verb", "one scale a row"),
        (3, "inversion", "Of"),
        (3, "what as a subject", "what is"),
        (3, "word", "anew"),
        (10, "court or house", "blame"),
        (12, "court or house", "verdict"),
        (14, "inversion", "| By"),
    ]
    prose = extract_prose(PAGE)
    assert prose.count("\n") == PAGE.count("\n")
    assert "echo" not in prose


@pytest.mark.parametrize(("text", "words"), [("", 0), ("one\ntwo | three\n", 4)])
def test_words_are_counted_as_wc_counts_them(text: str, words: int) -> None:
    assert count_words(text) == words
