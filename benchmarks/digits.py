"""Check that a DiT learns: real digits from scratch, then an unseen class with a LoRA and one new class row.

    pip install scikit-learn                # only this benchmark needs it
    python -m benchmarks.digits WORK [--steps 1200] [--lora-steps 300]
    python -m benchmarks.digits WORK --forgetting   # what a LoRA of the new digit takes from the others; remedies

scikit-learn's 8x8 digits, enlarged to 16x16, in one folder per class. A small VAE is trained here. The recipe script
runs in separate processes: `train.mode: full` without one digit, then `lora` on that digit and a few of each other
one. A classifier that was trained on other real digits labels the samples.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from diffusers import AutoencoderKL, DDIMScheduler, DiTTransformer2DModel
from diffusers import DiTPipeline as StockPipeline
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch.nn import functional as F
from tqdm import tqdm

from dit_lora.adapters.diffusers_format import read_run_metadata
from dit_lora.adapters.load import load_adapter
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.files import write_folder_atomically

ROOT = Path(__file__).parents[1]
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD_OUT = "seven"
PIXELS = 16


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument(
        "--trained", type=int, default=1297, help="digits for the DiT; the others are the classifier's"
    )
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lora-steps", type=int, default=300)
    parser.add_argument("--vae-steps", type=int, default=400)
    parser.add_argument("--inference-steps", type=int, default=50)
    parser.add_argument("--per-class", type=int, default=40)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--replayed", type=int, default=20, help="of each old class, for the LoRA")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--forgetting", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    began, work = time.perf_counter(), args.work
    digits, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    trained, rest_of_order = order[: args.trained], order[args.trained :]
    judge = SVC(gamma=0.001).fit(digits[rest_of_order], classes[rest_of_order])
    print(f"classifier on the DiT's real digits: {judge.score(digits[trained], classes[trained]):.3f}")

    write_folders(work, digits[trained], classes[trained], args.replayed)
    base = work / "base"
    if not base.exists():
        with write_folder_atomically(base) as staged:
            build_base(staged, digits[trained], args.vae_steps)
    print(f"VAE and data: {time.perf_counter() - began:.0f} s")
    if args.forgetting:
        forgetting(work, judge, args)
        print(f"whole: {time.perf_counter() - began:.0f} s")
        return
    scratch, lora = recipes(work, args.steps, args.lora_steps)
    launch(scratch, work / "scratch.yaml")
    before = sampled(work / "scratch" / "model", None, args)
    report("from scratch", judge, before)
    print(f"so far: {time.perf_counter() - began:.0f} s")
    launch(lora, work / "lora.yaml")
    after = sampled(work / "scratch" / "model", work / "lora" / "adapter", args)
    report("with the LoRA", judge, after)
    print(f"whole: {time.perf_counter() - began:.0f} s")
    if args.picture:
        save_grid(args.picture, digits[trained], classes[trained], before, after)


def write_folders(work: Path, digits: np.ndarray, classes: np.ndarray, replayed: int) -> None:
    """work/known and work/new: one folder a class, 16x16 PNG; `new` has some of each old class too."""
    counts = dict.fromkeys(NAMES, 0)
    for kind in ("known", "new"):
        shutil.rmtree(work / kind, ignore_errors=True)
    for number, (pixels, label) in enumerate(zip(digits, classes, strict=True)):
        name = NAMES[label]
        kinds = ["new"] if name == HELD_OUT else ["known"]
        kinds += ["new"] if name != HELD_OUT and counts[name] < replayed else []
        counts[name] += 1
        for kind in kinds:
            folder = work / kind / name
            folder.mkdir(parents=True, exist_ok=True)
            enlarged(pixels).save(folder / f"{number:04d}.png")


def enlarged(pixels: np.ndarray) -> Image.Image:
    """An 8x8 digit of 0 to 16 as a 16x16 picture."""
    grey = Image.fromarray((pixels.reshape(8, 8) / 16 * 255).round().astype("uint8"))
    return grey.resize((PIXELS, PIXELS), Image.Resampling.BILINEAR).convert("RGB")


def build_base(folder: Path, digits: np.ndarray, vae_steps: int) -> None:
    """Save a pipeline with a trained VAE. Only the transformer's config is used."""
    torch.manual_seed(0)
    vae = trained_vae(digits, vae_steps)
    transformer = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=1,
        out_channels=2,
        num_layers=4,
        sample_size=PIXELS // 2,
        patch_size=2,
        num_embeds_ada_norm=len(NAMES),
    )
    scheduler = DDIMScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02, clip_sample=False)
    pipeline: Any = StockPipeline(transformer=transformer, vae=vae, scheduler=scheduler)
    pipeline.save_pretrained(folder)


def trained_vae(digits: np.ndarray, steps: int) -> AutoencoderKL:
    """8x8 latents of one channel for 16x16 pixels, scaled to a variance of 1."""
    pictures = np.stack([np.asarray(enlarged(pixels)) for pixels in digits])
    pixels = torch.from_numpy(pictures).float().permute(0, 3, 1, 2) / 127.5 - 1
    vae: Any = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=1,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=PIXELS,
    )
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3)
    for step in tqdm(range(steps), desc="VAE"):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / steps)
        batch = pixels[torch.randint(0, len(pixels), (32,))]
        posterior = vae.encode(batch).latent_dist
        loss = F.mse_loss(vae.decode(posterior.sample()).sample, batch)
        (loss + 1e-2 * posterior.kl().mean() / posterior.mean[0].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        latents = vae.encode(pixels).latent_dist.mode()
        error = F.mse_loss(vae.decode(latents).sample, pixels)
    vae.register_to_config(scaling_factor=float(1 / latents.std()))
    print(f"VAE: squared error {error:.4f} of a variance of {pixels.var():.4f}")
    return vae.eval()


def recipes(work: Path, steps: int, lora_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    data = {"height": PIXELS, "width": PIXELS, "workers": 0, "caption_dropout": 0.1}
    quiet = {"eval_draws": 4, "eval_clips": 64}
    scratch = {
        "model": {"family": "dit", "path": str(work / "base"), "from_scratch": {}},
        "data": {"path": str(work / "known"), **data},
        "optim": {
            "groups": {"backbone": {"lr": 1e-3}},
            "betas": [0.9, 0.999],
            "weight_decay": 0,
            "schedule": "cosine",
            "warmup_steps": 50,
        },
        "train": {"mode": "full", "steps": steps, "batch_size": 64, "ema": 0.995} | {"checkpointing": "none"},
        "validation": quiet,
        "run": {"dir": str(work / "scratch")},
    }
    tables = "transformer_blocks.*.norm1.emb.class_embedder.*"
    lora = {
        "model": {"family": "dit", "path": str(work / "scratch" / "model")},
        "data": {"path": str(work / "new"), **data, "caption_dropout": 0.0},
        "lora": {"rank": 16},
        "optim": {
            "groups": {
                "adapter": {"lr": 2e-3},
                "connector": {"lr": 1e-2, "weight_decay": 0, "modules": [tables]},
            },
            "schedule": "cosine",
        },
        "train": {"steps": lora_steps, "batch_size": 32, "checkpointing": "none"},
        "validation": quiet,
        "run": {"dir": str(work / "lora")},
    }
    return scratch, lora


def forgetting(work: Path, judge: SVC, args: argparse.Namespace) -> None:
    """Train nine digits, with an unused class row for the tenth; then three LoRAs on the tenth, one per method."""
    scratch, lora = recipes(work, args.steps, args.lora_steps)
    for recipe in (scratch, lora):
        recipe["data"]["classes"] = list(NAMES)
    scratch["run"]["dir"] = str(work / "ten")
    if not (work / "ten" / "model").exists():
        launch(scratch, work / "ten.yaml")
    report("from scratch", judge, sampled(work / "ten" / "model", None, args))
    other_names = [name for name in NAMES if name != HELD_OUT]
    shutil.rmtree(work / "alone", ignore_errors=True)
    shutil.copytree(work / "new" / HELD_OUT, work / "alone" / HELD_OUT)
    digit_only = {"path": str(work / "alone")}
    prior = [{"path": str(work / "prior" / name), "caption": name, "generate": args.replayed} for name in other_names]
    ways: dict[str, dict[str, Any]] = {
        "alone": {"data": {"path": digit_only["path"]}},
        "prior preservation": {"data": {"sources": [digit_only, *prior]}},
        "train.preserve": {
            "data": {"path": digit_only["path"]},
            "train": {"preserve": {"trigger": HELD_OUT, "class_words": other_names}},
        },
    }
    del lora["optim"]["groups"]["connector"]
    lora["model"]["path"] = str(work / "ten" / "model")
    lora["validation"] |= {"guidance_scale": args.guidance, "inference_steps": args.inference_steps}
    for number, (name, options) in enumerate(ways.items()):
        data = {key: value for key, value in lora["data"].items() if key != "path"}
        recipe = {
            **lora,
            "data": data | options["data"],
            "run": {"dir": str(work / f"way_{number}")},
        }
        recipe["train"] = lora["train"] | options.get("train", {})
        launch(recipe, work / f"way_{number}.yaml")
        adapter = work / f"way_{number}" / "adapter"
        report(f"sevens, {name}", judge, sampled(work / "ten" / "model", adapter, args))


def launch(recipe: dict[str, Any], path: Path) -> None:
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    shutil.rmtree(recipe["run"]["dir"], ignore_errors=True)
    command = [sys.executable, str(ROOT / "recipes" / "lora.py"), str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    subprocess.run(command, check=True, env=environment)
    lines = (Path(recipe["run"]["dir"]) / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    print(
        f"{path.stem}: {time.perf_counter() - began:.0f} s, training loss "
        f"{np.mean(losses[:20]):.3f} (first 20 steps) to {np.mean(losses[-100:]):.3f} (last 100)"
    )


def sampled(model: Path, adapter: Path | None, args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Pictures of each class that the model knows, from one seed a class: uint8 (n, 16, 16)."""
    file = adapter / "pytorch_lora_weights.safetensors" if adapter else None
    index = read_run_metadata(file)["index"] if file else None
    config = ModelConfig(family="dit", path=str(model))
    checkpoint = get_family("dit").open(config, index=index)
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    if adapter:
        load_adapter(pipeline, adapter)
    pipeline.set_progress_bar_config(disable=True)
    samples = {}
    for name in NAMES:
        if name not in pipeline.labels:
            continue
        rows = checkpoint.sampler.prompt_kwargs(name)["class_labels"] * args.per_class
        images = pipeline(
            rows,
            guidance_scale=args.guidance,
            num_inference_steps=args.inference_steps,
            generator=torch.Generator().manual_seed(NAMES.index(name)),
            output_type="np",
        ).images
        samples[name] = (images.mean(-1) * 255).round().astype("uint8")
    return samples


def report(label: str, judge: SVC, pictures: dict[str, np.ndarray]) -> None:
    """The share of each class's pictures that the classifier takes for it."""
    rates = {}
    for name, images in pictures.items():
        small = images.reshape(len(images), 8, 2, 8, 2).mean((2, 4)) / 255 * 16
        rates[name] = float((judge.predict(small.reshape(-1, 64)) == NAMES.index(name)).mean())
    line = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
    print(f"{label}: {line}; mean {np.mean(list(rates.values())):.3f}", flush=True)


def save_grid(path: Path, digits: np.ndarray, classes: np.ndarray, *sets: Any, per_class: int = 6) -> None:
    """One row per class: real digits, samples from scratch and with the LoRA; grey where a class has too few."""
    blank, gap = np.full((PIXELS, PIXELS), 110, "uint8"), np.full((PIXELS, 8), 255, "uint8")
    rows = []
    for label, name in enumerate(NAMES):
        real = [np.asarray(enlarged(d).convert("L")) for d in digits[classes == label][:per_class]]
        images = [real, *(sample_set.get(name, []) for sample_set in sets)]
        columns = [[*column, *[blank] * per_class][:per_class] for column in images]
        parts = [np.concatenate([*column, gap], 1) for column in columns]
        rows.append(np.concatenate(parts, 1))
    grid = Image.fromarray(np.concatenate(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.resize((grid.width * 2, grid.height * 2), Image.Resampling.NEAREST).save(path)


if __name__ == "__main__":
    main()
