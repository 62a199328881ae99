"""What the README says of other trainers is looked up at a commit, and a text that is not there is named."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import trainers
from benchmarks.trainers import Evidence


@pytest.fixture
def clones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a clone in which `README.md` was changed after the commit that is looked up."""
    clone = tmp_path / "trainer"
    clone.mkdir()

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        return subprocess.run(
            ["git", "-C", str(clone), *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet")
    for text in ("a web interface", "no such thing"):
        (clone / "README.md").write_text(text)
        git("add", "README.md")
        git("commit", "--quiet", "-m", text)
    monkeypatch.setattr(trainers, "COMMITS", {"trainer": git("rev-parse", "HEAD~1")})
    return tmp_path


def test_texts_names_and_absent_texts_are_looked_up_at_the_commit(
    clones: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evidence = (
        Evidence("trainer", "interface", "README.md", ("a web interface",)),
        Evidence("trainer", "files", "", ("README.md",)),
        Evidence("trainer", "no command line", "*.md", ("command line",), is_absent=True),
    )
    monkeypatch.setattr(trainers, "EVIDENCE", evidence)
    trainers.main([str(clones)])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows[0] == "| trainer | interface | `README.md` | yes |"
    assert rows[1].endswith("| `names of files` | yes |")
    assert rows[2].endswith("| no, as it says |")


@pytest.mark.parametrize(
    "evidence",
    [
        Evidence("trainer", "cell", "README.md", ("a web interface", "Windows")),
        Evidence("trainer", "cell", "", ("LICENSE",)),
        Evidence("trainer", "cell", "*.md", ("a web interface",), is_absent=True),
    ],
)
def test_what_is_not_as_the_readme_says_is_named(
    clones: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], evidence: Evidence
) -> None:
    monkeypatch.setattr(trainers, "EVIDENCE", (evidence,))
    with pytest.raises(SystemExit, match="1 of 1 are not as the README says"):
        trainers.main([str(clones)])
    assert f"**no**: {evidence.texts[-1]}" in capsys.readouterr().out


def test_a_missing_file_or_clone_is_an_error(clones: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "EVIDENCE", (Evidence("trainer", "cell", "LICENSE", ("MIT",)),))
    with pytest.raises(SystemExit, match="LICENSE"):
        trainers.main([str(clones)])
    with pytest.raises(SystemExit, match="elsewhere"):
        trainers.main([str(clones / "elsewhere")])
