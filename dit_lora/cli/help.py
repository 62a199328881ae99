"""The order in which `dit-lora --help` shows the verbs, and the examples below each one's own help."""

import typer
from typer.models import CommandInfo, TyperInfo

PANELS = {
    "Start": ("doctor", "recipes", "init", "tiny", "shapes"),
    "Data": ("audit", "show", "cache"),
    "Train": ("plan", "replay", "quarantine", "faults"),
    "Use what was trained": ("report", "sample", "verify", "export", "push", "chat", "evaluate"),
    "Reference": ("families", "schema", "convert"),
}
"""Verbs in the order in which a newcomer needs them."""

EXAMPLES = {
    "doctor": ("doctor", "doctor --config-file one_gpu.yaml"),
    "recipes": ("recipes", "recipes --family cogvideox"),
    "init": ("init smoke/cogvideox my-run", "init cogvideox/5b_t2v kitten --accelerate ddp"),
    "tiny": ("tiny cogvideox-2b tiny/cogvideox-2b",),
    "shapes": ("shapes clips", "shapes images --frames 1", "shapes conversations --chat"),
    "audit": ("audit clips --html audit.html", "audit cogvideox_5b_t2v.yaml data.path=clips"),
    "show": ("show chat_qwen.yaml",),
    "cache": ("cache build cogvideox_5b_t2v.yaml", "cache stats runs/cache"),
    "cache build": ("cache build cogvideox_5b_t2v.yaml data.path=clips",),
    "cache verify": ("cache verify runs/cache --set-aside",),
    "cache stats": ("cache stats runs/cache",),
    "cache prune": ("cache prune runs/cache --keep cogvideox_5b_t2v.yaml",),
    "plan": ("plan cogvideox_5b_t2v.yaml --gpu 24GiB", "plan cogvideox_5b_t2v.yaml lora.rank=16"),
    "replay": ("replay runs/kitten/bundles/step_000012",),
    "quarantine": ("quarantine runs/kitten", "quarantine runs/kitten --release clip.mp4"),
    "faults": ("faults --only '*latent*'",),
    "report": ("report runs/kitten", "report runs/kitten --serve"),
    "sample": ("sample runs/kitten --prompt 'a kitten in the snow' --seed 1",),
    "verify": ("verify runs/kitten",),
    "export": (
        "export runs/kitten --to comfyui --out kitten-comfyui",
        "export runs/kitten runs/snow --weight 1 --weight 0.5 --to diffusers --out both",
    ),
    "push": (
        "push runs/kitten me/kitten-lora --dry-run",
        "push runs/kitten me/kitten-lora --private",
    ),
    "chat": ("chat runs/my-chat --video clip.mp4 --prompt 'What moves?'",),
    "evaluate": ("evaluate runs/my-chat --data MVBench --against base",),
    "families": ("families",),
    "schema": ("schema > schema.json",),
    "convert": ("convert videochat2 --help",),
    "convert opendit": ("convert opendit video-dit-mine --weights epoch99/ema.pt",),
    "convert videochat2": (
        "convert videochat2 videochat2-mistral --llm Mistral-7B-Instruct-v0.2 "
        "--qformer-tokenizer bert-base-uncased --vision umt_l16_qformer.pth "
        "--stage videochat2_mistral_7b_stage2.pth --stage videochat2_mistral_7b_stage3.pth",
    ),
}
"""Commands to type, after `dit-lora`."""

EPILOG = """Type first:
  dit-lora doctor
  dit-lora recipes
  dit-lora init smoke/cogvideox my-run
Train, in the folder that init writes:
  accelerate launch --quiet --config_file one_gpu.yaml lora.py RECIPE.yaml \\[key.path=value ...]"""


def arrange(app: typer.Typer) -> None:
    """Put every verb into its panel, in order, with its examples below; call it when all are registered."""
    panel_of = {verb: panel for panel, verbs in PANELS.items() for verb in verbs}
    order = {verb: number for number, verb in enumerate(panel_of)}
    app.registered_commands.sort(key=lambda verb: order.get(name_of(verb), len(order)))
    registered: list[CommandInfo | TyperInfo] = [*app.registered_commands, *app.registered_groups]
    for verb in registered:
        verb.rich_help_panel = panel_of.get(name_of(verb))
        _add_examples(verb, name_of(verb))
        inner = verb.typer_instance if isinstance(verb, TyperInfo) else None
        for command in inner.registered_commands if inner else ():
            _add_examples(command, f"{name_of(verb)} {name_of(command)}")


def name_of(verb: CommandInfo | TyperInfo) -> str:
    """Return the word that a user types."""
    return verb.name or (verb.callback.__name__ if verb.callback else "")


def _add_examples(verb: CommandInfo | TyperInfo, name: str) -> None:
    examples = EXAMPLES.get(name, ())
    lines = ["Example:" if len(examples) == 1 else "Examples:"]
    lines += [f"  dit-lora {example}" for example in examples]
    verb.epilog = "\n".join(lines) if examples else None
