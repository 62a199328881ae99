"""The wheel holds the two packages whole, with what `dit-lora init` writes; and a first hour needs nothing else."""

import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from fake_hub import FakeHub
from launching import ROOT, launch_environment

pytestmark = pytest.mark.slow

STOCK = ("lora.py", "schema.json", "README.md", "cogvideox/5b_t2v.yaml", "smoke/cogvideox.yaml")
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in ("dit_lora", "dit_lora_kernels"):
    package = importlib.import_module(name)
    assert package.__file__.startswith(sys.argv[1]), package.__file__
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        importlib.import_module(module.name)
        print(module.name)
"""
# An empty line asks where the package is.
ONE_AFTER_THE_OTHER = """
import shlex, sys
import dit_lora
from dit_lora.cli import main

for line in sys.argv[1:]:
    sys.argv = shlex.split(line) or ["dit-lora"]
    if line:
        assert sys.argv[0] == "dit-lora", line
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
    else:
        print(dit_lora.__file__)
    print(end="\\0")
"""
# Of the Hub's copy and of the folded file, in plain Diffusers.
LOAD_BACK = """
import sys
import torch
from diffusers import CogVideoXPipeline

def video(adapter=None):
    pipe = CogVideoXPipeline.from_pretrained("tiny/cogvideox-2b")
    if adapter:
        pipe.load_lora_weights(adapter)
    pipe.set_progress_bar_config(disable=True)
    shape = {"num_frames": 9, "height": 64, "width": 96}
    draw = torch.Generator().manual_seed(0)
    return torch.from_numpy(pipe("x", num_inference_steps=1, generator=draw, output_type="np", **shape).frames)

base, *others = video(), *map(video, sys.argv[1:])
assert not any("dit_lora" in name for name in sys.modules)
same = all(torch.allclose(other, others[0], atol=1e-5) for other in others)
differs = not torch.allclose(base, others[0], atol=1e-4)
print("equal, and not the base\\047s" if same and differs else "no")
"""


def hub_environment(hub: FakeHub, home: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_any",
        "HF_HOME": str(home),
    }


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


def test_the_wheel_holds_two_packages_their_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"dit_lora", "dit_lora_kernels"}
    data = {
        path.relative_to(ROOT).as_posix()
        for pattern in (
            "report/*.html",
            "report/*.css",
            "report/*.js",
            "report/vendor/*",
            "hub/*.md",
            "hub/*.jinja",
            "py.typed",
        )
        for path in (ROOT / "dit_lora").glob(pattern)
    }
    assert len(data) > 8
    assert data <= set(names)
    sources = {
        path.relative_to(root).as_posix()
        for root in (ROOT, ROOT / "kernels")
        for path in root.glob("dit_lora*/**/*.py")
    }
    stock = {
        f"dit_lora/stock_files/{path.relative_to(ROOT).as_posix()}"
        for folder in ("recipes", "accelerate_configs")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {f"dit_lora/stock_files/recipes/{name}" for name in STOCK} < stock
    code = {name for name in names if name.endswith(".py")}
    assert {name for name in names if name.startswith("dit_lora/stock_files/")} == stock
    assert code - stock == sources


@pytest.mark.thorough
def test_every_module_imports_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """In a folder of its own, without the checkout on the path."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    script = f"import sys; sys.path.insert(0, sys.argv[1])\n{IMPORT_ALL}"
    process = subprocess.run(
        [sys.executable, "-I", "-c", script, str(site)],
        cwd=tmp_path,
        env=launch_environment(),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.split()) > 25


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A virtual environment with the wheel; what it depends on comes from this one's site-packages."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    # A line of a .pth is a place to import from; the .pth files there, such as the checkout's, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    accelerate = home / "bin" / "accelerate"
    accelerate.write_text(f"#!{python}\nfrom accelerate.commands.accelerate_cli import main\nmain()\n")
    accelerate.chmod(0o755)
    return {**launch_environment(), "PATH": f"{home / 'bin'}:/usr/bin:/bin", "PYTHONPATH": ""}


def test_a_first_hour_with_the_wheel_alone(environment: dict[str, str], tmp_path: Path) -> None:
    """What `init` says to type is typed as it stands, in an empty folder; then a run is looked at."""

    def typed(line: str, where: Path = tmp_path) -> str:
        process = subprocess.run(
            ["bash", "-e", "-c", line],
            cwd=where,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, f"{line}\n{process.stdout}\n{process.stderr}"
        assert "Traceback" not in process.stderr
        return process.stdout

    def run_lines(*lines: str, where: Path = tmp_path) -> list[str]:
        """Run lines of dit-lora in one process, which imports once, and return what each prints."""
        return typed(shlex.join(["python", "-c", ONE_AFTER_THE_OTHER, *lines]), where).split("\0")[:-1]

    output_lines = typed("dit-lora init smoke/cogvideox my-run").splitlines()
    enter, *prepare, launch = [line.strip() for line in output_lines[output_lines.index("Next:") + 1 :]]
    assert enter == "cd my-run"
    folder, run = tmp_path / "my-run", "runs/smoke-cogvideox"
    looked_at = [f"dit-lora {verb} smoke_cogvideox.yaml" for verb in ("audit", "plan")]
    doctor_output, package_path, *_ = run_lines("dit-lora doctor", "", *prepare, *looked_at, where=folder)
    assert "ready to train" in doctor_output
    assert str(ROOT) not in package_path
    typed(f"{launch} train.steps=3 validation.prompts=[]", where=folder)
    assert (folder / run / "adapter" / "pytorch_lora_weights.safetensors").is_file()
    (folder / run / "report.html").unlink()  # the run's own

    with FakeHub(tmp_path / "hub") as hub:
        environment |= hub_environment(hub, tmp_path / "hf")
        _, sample_output, verify_output, _, push_output = run_lines(
            f"dit-lora report {run}",
            f"dit-lora sample {run} --prompt x --inference-steps 1",
            f"dit-lora verify {run}",
            f"dit-lora export {run} --to folded --out folded",
            f"dit-lora push {run} me/first-lora --private",
            where=folder,
        )
        assert (folder / run / "report.html").is_file()
        (video,) = sample_output.split()
        assert (folder / video).stat().st_size > 0
        assert "every check passed" in verify_output
        assert f"to {hub.url}/me/first-lora" in push_output.splitlines()[-1]
        loaded = typed(f"python -c '{LOAD_BACK}' me/first-lora folded", where=folder)
    assert loaded.strip() == "equal, and not the base's"
