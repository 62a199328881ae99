"""What pages have before their first block runs, what stands in for the Hub and for a GPU, and what is not run."""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launching import ROOT, started
from PIL import Image
from runs import poison

from dit_lora.config.load import dump_recipe, load_recipe
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.data.synthetic.conversations import write_conversations
from dit_lora.environment.versions import get_package_status, probe_environment

PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(path for path in ROOT.glob("*.md")),
        *(ROOT / folder / "README.md" for folder in ("recipes", "accelerate_configs", "benchmarks")),
        *(ROOT / "kernels").rglob("README.md"),
    ]
)

# A GPU, the Hub's checkpoints, and the recipes of their shapes: what a test has in their place.
HUB = {
    "THUDM/CogVideoX-2b": "cogvideox-2b",
    "THUDM/CogVideoX-5b": "cogvideox-5b",
    "THUDM/CogVideoX-5b-I2V": "cogvideox-5b-i2v",
    "THUDM/CogVideoX1.5-5B": "cogvideox-1.5",
    "THUDM/CogVideoX1.5-5B-I2V": "cogvideox-1.5-i2v",
    "Efficient-Large-Model/Sana_600M_512px_diffusers": "sana-600m",
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": "sana-600m",
    "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers": "sana-1.5",
    "Efficient-Large-Model/SANA-Video_2B_480p_diffusers": "sana-video",
    "black-forest-labs/FLUX.1-dev": "flux-dev",
    "black-forest-labs/FLUX.1-schnell": "flux-schnell",
    "black-forest-labs/FLUX.2-klein-base-4B": "flux2-klein",
    "black-forest-labs/FLUX.2-klein-base-9B": "flux2-klein",
    "black-forest-labs/FLUX.2-dev": "flux2-dev",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": "hunyuan-video-1.5",
    "kandinskylab/Kandinsky-5.0-T2V-Lite-pretrain-5s-Diffusers": "kandinsky-5-t2v",
    "krea/Krea-2-Raw": "krea2-raw",
    "Tongyi-MAI/Z-Image": "z-image",
    "Tongyi-MAI/Z-Image-Turbo": "z-image-turbo",
    "Qwen/Qwen-Image": "qwen-image",
    "Qwen/Qwen-Image-2.1": "qwen-image-2.1",
    "baidu/ERNIE-Image": "ernie-image",
    "CalamitousFelicitousness/Ideogram-4-bf16-Diffusers": "ideogram-4",
    "circlestone-labs/Anima-Base-v1.0-Diffusers": "anima",
    "lodestones/Chroma1-HD": "chroma",
    "Lightricks/LTX-Video": "ltx-video",
    "stabilityai/stable-diffusion-3.5-medium": "sd3.5-medium",
    "stabilityai/stable-diffusion-3.5-large": "sd3.5-large",
    "facebook/DiT-XL-2-256": "dit-tiny",
    "maxin-cn/Latte-1": "latte",
    "videochat2-mistral-stage2": "videochat2-mistral",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2.5-vl",
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": "smolvlm2",
    "llava-hf/LLaVA-NeXT-Video-7B-hf": "llava-next-video",
}
SMALL: dict[str, Sequence[str]] = {
    "diffusion": (
        "data.frames=9",
        "data.height=32",
        "data.width=48",
        "data.workers=0",
        "lora.rank=4",
        "train.steps=4",
        "validation.inference_steps=2",
        "validation.eval_draws=1",
    ),
    "chat": (
        "data.frames=4",
        "data.height=32",
        "data.width=32",
        "data.workers=0",
        "lora.rank=4",
        "train.steps=4",
    ),
}
# Verbs that take a minute where nothing is said: what is said then.
CHEAP = {
    "chat": ("--max-tokens", "8"),
    "sample": ("--inference-steps", "2"),
}
PYTHON = {'"cuda"': '"cpu"'}


@dataclass(frozen=True)
class Shared:
    """What tests make once: tiny checkpoints by variant, a folder of clips."""

    tiny: dict[str, Path]
    clips: Path
    runs: Path
    """Where `trained` keeps the runs that several pages need."""

    def trained(self, smoke: str, *overrides: str) -> Path:
        """The folder of a run of a smoke recipe, which is trained at the first call."""
        run = self.runs / smoke
        if not run.exists():
            recipe = ROOT / "recipes" / "smoke" / f"{smoke}.yaml"
            process = started([recipe, *overrides, f"run.dir={run}"]).wait()
            assert process.returncode == 0, process.stderr
        return run


_CHECKOUT = ("recipes", "accelerate_configs", "benchmarks", "kernels", "tests", "constraints.txt")
Prepare = Callable[[Path, Shared], dict[str, Any]]


def prepare(page: Path, folder: Path, shared: Shared) -> dict[str, Any]:
    """The page's folder, and the names that its python blocks have from the start."""
    for path in ROOT.iterdir():
        if path.name in _CHECKOUT:
            (folder / path.name).symlink_to(path)
    names = _PREPARED.get(str(page.relative_to(ROOT)), _clips)(folder, shared)
    return {"__name__": "__main__", **names}


_QUICK = (
    "data.height=32",
    "data.width=48",
    "train.steps=2",
    "validation.prompts=[]",
    "validation.eval_draws=0",
)


def _clips(folder: Path, shared: Shared) -> dict[str, Any]:
    (folder / "clips").symlink_to(shared.clips)
    base = ROOT / "recipes" / "smoke" / "cogvideox.yaml"
    values = load_recipe(base, [f"model.path={shared.tiny['cogvideox-2b']}", *_QUICK])
    for name in ("recipe.yaml", "RECIPE.yaml"):
        (folder / name).write_text(dump_recipe(values))
    return {}


def _tiny_cogvideox(folder: Path, shared: Shared) -> None:
    (folder / "tiny").mkdir()
    (folder / "tiny" / "cogvideox-2b").symlink_to(shared.tiny["cogvideox-2b"])


def _kernels(_folder: Path, shared: Shared) -> dict[str, Any]:
    from diffusers import CogVideoXPipeline
    from peft import LoraConfig

    pipe = CogVideoXPipeline.from_pretrained(shared.tiny["cogvideox-5b"])
    pipe.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"]))
    return {"pipe": pipe}


def _numerics(folder: Path, shared: Shared) -> dict[str, Any]:
    """A cache of which one clip's latent has a NaN."""
    _tiny_cogvideox(folder, shared)
    write_shapes(folder / "clips", clips=6, frames=17, height=64, width=96, fps=8)
    smoke = folder / "recipes" / "smoke" / "cogvideox.yaml"
    small = [f"{key}={folder / value}" for key, value in _SMOKE_PATHS.items()]
    process = started([smoke, *small, "train.steps=1", "validation.prompts=[]"]).wait()
    assert process.returncode == 0, process.stderr
    poison(folder / "runs" / "cache", "03_red_square.mp4")
    return {}


def _guard_anywhere(folder: Path, shared: Shared) -> dict[str, Any]:
    _tiny_cogvideox(folder, shared)
    return _loop(folder)


_SMOKE_PATHS = {"model.path": "tiny/cogvideox-2b", "data.path": "clips", "run.dir": "runs/smoke"}


def _loop(folder: Path) -> dict[str, Any]:
    import torch
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(plain)
    data = [{"names": f"clip_{row}.mp4", "x": torch.randn(3)} for row in range(4)]
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, lr_scheduler = accelerator.prepare(model, plain, schedule)
    trainer = Trainer(torch.nn.Linear(3, 2), TrainingArguments(str(folder / "trainer")))
    return {
        "accelerator": accelerator,
        "model": model,
        "transformer": model,
        "optimizer": optimizer,
        "lr_scheduler": lr_scheduler,
        "loader": loader,
        "generator": torch.Generator(),
        "trainer": trainer,
    }


def your_own(page: Path, folder: Path, shared: Shared) -> None:
    """What a reader brings into a folder that the page has made meanwhile."""
    for name, source in _YOUR_OWN.get(str(page.relative_to(ROOT)), {}).items():
        path = folder / name
        if path.parent.is_dir() and not path.exists():
            path.symlink_to(shared.clips if source == "clips" else folder / source)


_VERSION = re.compile(r"^ (?P<name>[\w-]+) +(?P<set>\S+) +(?P<tested>\S+) +tested$", re.MULTILINE)


def as_installed(text: str) -> str:
    """The table of `dit-lora doctor` with constraints.txt's versions on a CPU, as it reads with the installed ones."""
    env = probe_environment()

    def row(printed: re.Match[str]) -> str:
        name = printed["name"]
        return f" {name} {env.versions[name]} {printed['tested']} {get_package_status(name, env)}"

    return _VERSION.sub(row, text)


_YOUR_OWN = {
    "README.md": {"my-run/clips": "clips"},
    "docs/first_lora.md": {"kitten/clips": "clips"},
    "docs/video_chat.md": {"runs/my-chat": "runs/smoke-videochat2"},
}


def _index(folder: Path, _shared: Shared) -> dict[str, Any]:
    return _loop(folder)


def _video_chat(folder: Path, shared: Shared) -> dict[str, Any]:
    """The media that the page's conversations name."""
    write_conversations(folder / "given", clips=2, images=1, frames=80, height=48, width=64, fps=8)
    clips = sorted((folder / "given" / "clips").iterdir())
    image = next((folder / "given" / "images").iterdir())
    for root in (folder, folder / "videos"):
        (root / "clips").mkdir(parents=True, exist_ok=True)
        for name, path in (("clips/a.mp4", clips[0]), ("c.mp4", clips[1]), ("a.mp4", clips[0])):
            shutil.copy(path, root / name)
        with Image.open(image) as picture:
            picture.convert("RGB").save(root / "b.jpg")
    base = ROOT / "recipes" / "smoke" / "videochat2.yaml"
    small = [f"model.path={shared.tiny['videochat2-mistral']}", "validation.prompts=[]"]
    recipe = load_recipe(base, [*small, "validation.media=[]", "train.steps=2"])
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    return {}


def _readme(folder: Path, shared: Shared) -> dict[str, Any]:
    import peft

    _clips(folder, shared)
    return {**_loop(folder), "peft": peft}


_PREPARED: dict[str, Prepare] = {
    "README.md": _readme,
    "docs/index.md": _index,
    "docs/guard_anywhere.md": _guard_anywhere,
    "docs/kernels.md": _kernels,
    "docs/numerics.md": _numerics,
    "docs/video_chat.md": _video_chat,
}

# Blocks that are not run, or text that is not compared, by page, with the reasons as the pages give them.
NOT_RUN: dict[str, list[str]] = {
    "CONTRIBUTING.md": ["the whole suite"],
    "README.md": ["they make or change an environment"],
    "docs/benchmarks/gradient_check.md": ["takes minutes to hours"],
    "docs/benchmarks/other_trainers.md": ["it clones four repositories"],
    "docs/benchmarks/world.md": ["it trains for hours"] * 3,
    "docs/checkpoints.md": ["needs Slurm and eight GPUs"],
    "docs/contributing.md": ["it builds the whole site"],
    "docs/evaluate_chat.md": ["lmms-eval downloads benchmarks from the Hub"] * 2,
    "docs/first_lora.md": [
        "it would install over what is tested",
        "it needs an account on the Hub",
    ],
    "docs/gpu.md": ["it needs a GPU"],
    "docs/guard_anywhere.md": [
        "it would install over what is tested",
        "needs several GPUs",
        "Lightning is an extra",
        "the script of Diffusers, and a GPU",
    ],
    "docs/hub.md": [
        "it needs an account on the Hub",
        "it needs the Hub",
        "it needs the Hub",
        "it serves until it is stopped",
    ],
    "docs/migrate_ai_toolkit.md": [
        "two thousand steps of FLUX.1-dev need a GPU",
        "an adapter of theirs",
    ],
    "docs/migrate_cogvideo.md": ["CogVideoX1.5-5B needs a GPU", "an adapter of theirs"],
    "docs/migrate_diffusers.md": [
        "a line of your own script",
        "two thousand steps of CogVideoX-2B need a GPU",
        "an adapter of theirs",
        "an adapter of theirs",
    ],
    "docs/migrate_finetrainers.md": [
        "a thousand steps of CogVideoX-5B need a GPU",
        "an adapter of theirs",
        "an adapter of theirs",
    ],
    "docs/migrate_musubi.md": [
        "eight hundred steps of Wan 2.1 need a GPU",
        "an adapter of theirs",
    ],
    "docs/migrate_simpletuner.md": [
        "a hundred steps of FLUX.1-dev need a GPU",
        "an adapter of theirs",
    ],
    "docs/numerics.md": ["takes minutes"],
    "docs/reports.md": ["it serves until Ctrl-C"],
    "docs/scaling.md": [
        "needs eight GPUs, two machines, Slurm",
        "needs several GPUs",
        "installs, and needs several GPUs",
        "needs eight GPUs",
    ],
    "docs/studio.md": ["it serves until Ctrl-C"],
    "docs/video_chat.md": ["needs the released files"],
    "kernels/bench/README.md": ["needs a GPU"],
}
EXAMPLES: dict[str, list[str]] = {
    "README.md": ["a run with a damaged clip"],
    "docs/checkpoints.md": ["a checkpoint of four processes, continued by two"],
    "docs/data.md": ["the files of a cache"],
    "docs/starts.md": ["entries of a recipe"],
    "docs/design.md": ["a drawing", "a drawing"],
    "docs/first_lora.md": [
        "of the published configs, which tests do not have; the text encoder's was not counted",
        "a run with a damaged clip",
    ],
    "docs/hub.md": ["of a session with a Hub that breaks"],
    "docs/index.md": ["made with its output in numerics.md"],
    "docs/kernels.md": ["CogVideoX-5B on a GPU"],
    "docs/models.md": [
        "needs the published checkpoint",
        "a part of a recipe",
        "a part of a recipe",
    ],
    "docs/numerics.md": ["a planted fault", "a checkpoint made so"],
    "docs/scaling.md": ["a run on a slow disk"],
    "docs/video_chat.md": ["a stage-3 file, tiny"],
}
