"""Counts the words of pages, and the mannerisms that their prose should not have.

    python -m tests.page_language              # per page: words, words of prose, mannerisms per 1,000 of these
    python -m tests.page_language docs/hub.md  # the mannerisms of this page, line by line

`tests/docs/test_page_language.py` holds the pages to ceilings.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Code, comments, the targets of links and headings are no prose. Line breaks are kept, for line numbers.
NOT_PROSE = re.compile(
    r"^[ ]*```.*?^[ ]*```[ ]*$|<!--.*?-->|`[^`\n]+`|(?<=\])\([^)\s]+\)|^#.*?$",
    re.DOTALL | re.MULTILINE,
)
_UNITS = "rank|step|run|layer|row|sample|caption|head|block|kernel|verb|process|model|file|picture|prompt|weight"
MANNERISMS = {
    "word": re.compile(
        r"\b(?:of which|beside|anew|for good|in words|is no|alone|of its own|whatever|is said|is told)\b",
        re.IGNORECASE,
    ),
    # "What is fatal is listed": a question keeps its "what".
    "what as a subject": re.compile(
        r"\bwhat (?:is|are|was|were|has|have|had|does|did|can|cannot|may|must|needs|comes|goes|trains|stays)\b"
        r"(?![^.|]*\?)",
        re.IGNORECASE,
    ),
    "court or house": re.compile(
        r"\b(?:verdicts?|convict\w*|innocents?|blam\w+|accus\w+|guilty|house|rooms?|strangers?)\b",
        re.IGNORECASE,
    ),
    # "Of several splits, `train` is taken", at the beginning of a sentence or of a cell.
    "inversion": re.compile(r"(?:^|[.:;|]\s+|^[-*] )(?:Of|By) (?!course\b|default\b)", re.MULTILINE),
    # "A folder a class", "one line a step".
    "a file a verb": re.compile(
        rf"\b(?:an?|one|two|three|\d+) (?!(?:of|in|from|where|to|at|for|with|as|on)\b)[a-z]+ an? (?:{_UNITS})\b",
        re.IGNORECASE,
    ),
}


def count_words(text: str) -> int:
    """Count words as `wc -w` does."""
    return len(text.split())


def extract_prose(text: str) -> str:
    """Blank out everything that is not prose, and keep the lines."""
    return NOT_PROSE.sub(lambda match: "\n" * match[0].count("\n"), text)


def find_mannerisms(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, kind and words of each mannerism in a page's prose."""
    prose = extract_prose(text)
    for kind, pattern in MANNERISMS.items():
        for match in pattern.finditer(prose):
            start = match.start() + len(match[0]) - len(match[0].lstrip())
            yield prose.count("\n", 0, start) + 1, kind, match[0].strip()


def main() -> None:
    paths = [Path(argument) for argument in sys.argv[1:]]
    if paths:
        for path in paths:
            for line, kind, words in sorted(find_mannerisms(path.read_text(encoding="utf-8"))):
                print(f"{path}:{line}: {kind}: {words}")
        return
    for path in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]:
        text = path.read_text(encoding="utf-8")
        prose, count = count_words(extract_prose(text)), len(list(find_mannerisms(text)))
        print(f"{path.name:28}{count_words(text):7}{prose:7}{1000 * count / prose:7.1f}")


if __name__ == "__main__":
    main()
