"""Looks up the README's statements about other trainers in their repositories.

    python -m benchmarks.trainers CLONES

CLONES has a clone of each repository, under its name: `ai-toolkit`, `SimpleTuner`, `musubi-tuner` and `diffusers`.
Every cell of the README's comparison except those of its first row is looked up at a fixed commit. The command prints
a row for each, and fails if a file does not have the text, or a folder has a text that it should not have. The first
row comes from runs: docs/guard_anywhere.md and docs/benchmarks/world.md.
"""

import argparse
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMMITS = {
    "ai-toolkit": "27a03a91f23eb1b757d5ec2e80ee3e129cfcc350",
    "SimpleTuner": "bc8e6ab7738ce457a2ed8eb2d26cadd91c6442cb",
    "musubi-tuner": "30c658c4f4b0bf05038b3346eff9670259b10fc7",
    "diffusers": "58eb52c0803ea9af3abec60841c2a093bdf1f951",
}
"""Commit of each repository, by its name."""


@dataclass(frozen=True)
class Evidence:
    """Texts that show a cell of the comparison."""

    repository: str
    cell: str
    """As in the README."""
    file: str
    """A file with all `texts`; with `is_absent`, a folder with no file that has any of them."""
    texts: tuple[str, ...]
    is_absent: bool = False


_MODELS_OF_AI_TOOLKIT = ("(FLUX.1)", "(FLUX.2)", "(Qwen-Image)", "(Z-Image)", "(Krea 2)", "(Wan 2.1 14B)", "(LTX-2)")
_MODELS_OF_SIMPLE_TUNER = (
    "**Flux.1**", "**Flux.2**", "**Qwen Image**", "**Z-Image**", "**Krea2**", "**Wan Video**", "**LTX Video 2**",
    "**Stable Diffusion 3**", "**LTX Video**", "**Sana**", "**Sana Video**",
)  # fmt: skip
_LORA_SCRIPTS = tuple(
    f"examples/dreambooth/train_dreambooth_lora_{name}.py"
    for name in ("flux", "flux2", "qwen_image", "z_image", "krea2", "sana", "sd3")
)
EVIDENCE = (
    Evidence(
        "ai-toolkit", "many of these, and SDXL, music", "README.md", (*_MODELS_OF_AI_TOOLKIT, "(SDXL)", "(Ace Step")
    ),
    Evidence("ai-toolkit", "web interface, YAML", "README.md", ("is a web interface", "whatever_you_want.yml")),
    Evidence(
        "ai-toolkit",
        "Windows; experimental: macOS, AMD",
        "README.md",
        ("run_windows.bat", "MacOS (Apple Silicon, experimental)"),
    ),
    Evidence(
        "ai-toolkit", "Windows; experimental: macOS, AMD", "manager/README.md", ("rocm7.1 (experimental) for AMD",)
    ),
    Evidence("ai-toolkit", "MIT; one consumer GPU, few clicks", "LICENSE", ("MIT License",)),
    Evidence(
        "ai-toolkit",
        "MIT; one consumer GPU, few clicks",
        "README.md",
        ("consumer grade hardware", "with a few clicks"),
    ),
    Evidence(
        "SimpleTuner",
        "most of these, and SDXL, music",
        "README.md",
        (*_MODELS_OF_SIMPLE_TUNER, "**Stable Diffusion XL**", "text-to-music"),
    ),
    Evidence("SimpleTuner", "web interface, commands", "README.md", ("web UI", "command-line tutorial")),
    Evidence("SimpleTuner", "AMD, macOS; Windows by WSL", "README.md", ("**AMD**: 7900 XTX", "**Apple**: M3 Max+")),
    Evidence("SimpleTuner", "AMD, macOS; Windows by WSL", "documentation/INSTALL.md", ("Windows 10 or newer", "WSL")),
    Evidence("SimpleTuner", "AGPL-3.0; breadth, teams", "LICENSE", ("GNU AFFERO GENERAL PUBLIC LICENSE", "Version 3")),
    Evidence("SimpleTuner", "AGPL-3.0; breadth, teams", "README.md", ("multi-user training platform",)),
    Evidence(
        "musubi-tuner",
        "Wan, Hunyuan, FLUX, Qwen-Image and others",
        "README.md",
        ("HunyuanVideo, Wan2.1/2.2, FramePack, FLUX.1 Kontext, FLUX.2 dev/klein, Qwen-Image, and Z-Image",),
    ),
    Evidence("musubi-tuner", "scripts, a GUI", "README.md", ("This repository provides scripts",)),
    Evidence("musubi-tuner", "scripts, a GUI", "src/musubi_tuner/gui/gui.md", ("Musubi Tuner GUI",)),
    Evidence("musubi-tuner", "Windows", "README.md", ("Windows compatibility confirmed",)),
    Evidence(
        "musubi-tuner",
        "Apache-2.0; little memory, ComfyUI",
        "README.md",
        ("Other code is under the Apache License 2.0", "Memory-efficient implementation"),
    ),
    Evidence("musubi-tuner", "Apache-2.0; little memory, ComfyUI", "docs/zimage.md", ("for ComfyUI",)),
    Evidence("diffusers", "one script each; none for Wan, LTX", "", _LORA_SCRIPTS),
    Evidence("diffusers", "one script each; none for Wan, LTX", "", ("examples/cogvideo/train_cogvideox_lora.py",)),
    Evidence(
        "diffusers",
        "one script each; none for Wan, LTX",
        "examples/*train*.py",
        ("WanTransformer3DModel", "LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel"),
        is_absent=True,
    ),
    Evidence("diffusers", "scripts", "examples/README.md", ("a collection of scripts",)),
    Evidence("diffusers", "MPS (macOS) handled", "examples/cogvideo/train_cogvideox_lora.py", ("mps.is_available()",)),
    Evidence("diffusers", "Apache-2.0; a file to change", "LICENSE", ("Apache License",)),
    Evidence("diffusers", "Apache-2.0; a file to change", "examples/README.md", ("easy-to-tweak",)),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clones", type=Path, help="folder with a clone of each repository")
    arguments = parser.parse_args(argv)
    print("| repository | README | looked up in | found |")
    print("|---|---|---|---|")
    num_missing = 0
    for evidence in EVIDENCE:
        missing = find_missing(arguments.clones / evidence.repository, COMMITS[evidence.repository], evidence)
        num_missing += bool(missing)
        result = f"**no**: {', '.join(missing)}" if missing else "no, as it says" if evidence.is_absent else "yes"
        name = evidence.file or "names of files"
        print(f"| {evidence.repository} | {evidence.cell} | `{name}` | {result} |")
    if num_missing:
        raise SystemExit(f"{num_missing} of {len(EVIDENCE)} are not as the README says")


def find_missing(clone: Path, commit: str, evidence: Evidence) -> list[str]:
    """Texts that are not there; with `is_absent`, those that are there."""
    if evidence.is_absent:
        return [text for text in evidence.texts if run_git(clone, "grep", "-l", text, commit, "--", evidence.file)]
    if evidence.file:
        content = run_git(clone, "show", f"{commit}:{evidence.file}")
    else:
        content = run_git(clone, "ls-tree", "-r", "--name-only", commit)
    return [text for text in evidence.texts if text not in content]


def run_git(clone: Path, *arguments: str) -> str:
    """Output of a git command; empty if it finds nothing. Raises `SystemExit` if it fails otherwise."""
    process = subprocess.run(["git", "-C", str(clone), *arguments], capture_output=True, text=True, check=False)
    # `git grep` ends with 1 if no file has the text.
    if process.returncode not in ((0, 1) if arguments[0] == "grep" else (0,)):
        raise SystemExit(f"git {' '.join(arguments)} in {clone}: {process.stderr.strip()}")
    return process.stdout


if __name__ == "__main__":
    main()
