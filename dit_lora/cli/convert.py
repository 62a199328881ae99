"""The verbs of `dit-lora convert`: checkpoints of ours from files that other code released or saved."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.arguments import NewFolder
from dit_lora.terminal import echo

EXAMPLES = {
    "convert": ("convert videochat2 --help",),
    "convert opendit": ("convert opendit video-dit-mine --weights epoch99/ema.pt",),
    "convert videochat2": (
        "convert videochat2 videochat2-mistral --llm Mistral-7B-Instruct-v0.2 "
        "--qformer-tokenizer bert-base-uncased --vision umt_l16_qformer.pth "
        "--stage videochat2_mistral_7b_stage2.pth --stage videochat2_mistral_7b_stage3.pth",
    ),
}

convert = typer.Typer(help="Convert released files to checkpoints.")


@convert.command("videochat2")
def convert_videochat2(
    out: NewFolder,
    llm: Annotated[Path, typer.Option(help="Folder of the language model (Mistral, Vicuna or Phi-3).")],
    qformer_tokenizer: Annotated[Path, typer.Option(help="Folder of bert-base-uncased.")],
    vision: Annotated[Path | None, typer.Option(help="The file umt_l16_qformer.pth.")] = None,
    stage: Annotated[
        list[Path] | None,
        typer.Option(help="The file videochat2_*_stage2.pth, then _stage3.pth or later. Repeat for several."),
    ] = None,
    legacy: Annotated[
        bool | None,
        typer.Option(
            "--legacy/--no-legacy",
            help="Compute as the released code: constant BOS, LayerNorm eps 1e-12. Default: with a stage-3 file.",
        ),
    ] = None,
    keep_adapter: Annotated[
        bool,
        typer.Option(
            "--keep-adapter", help="Keep the LoRA of stage 3 as an adapter, because merging it would round it."
        ),
    ] = False,
) -> None:
    """Convert the released files of VideoChat2 to one checkpoint.

    Every tensor of every file is used, or listed with the reason why it is not.
    """
    from dit_lora.environment.progress_bar import hide_progress_bars
    from dit_lora.models.videochat2.convert import convert_videochat2 as run

    hide_progress_bars()
    conversion = run(
        out,
        llm=llm,
        vision=vision,
        stages=stage or [],
        qformer_tokenizer=qformer_tokenizer,
        legacy=legacy,
        keep_adapter=keep_adapter,
        progress=lambda line: echo(line, err=True),
    )
    for line in conversion.lines():
        echo(line)


@convert.command("opendit")
def convert_opendit(
    out: NewFolder,
    weights: Annotated[
        Path, typer.Option(help="File ema.pt, a .safetensors file, or the folder model/ with .bin shards.")
    ],
    heads: Annotated[
        int | None, typer.Option(min=1, help="Number of attention heads, if the model is none of OpenDiT's own sizes.")
    ] = None,
    vae: Annotated[str | None, typer.Option(help="Folder or Hub id of the VAE. Default: OpenDiT's.")] = None,
    text_encoder: Annotated[str | None, typer.Option(help="Folder or Hub id of CLIP. Default: OpenDiT's.")] = None,
) -> None:
    """Convert a video checkpoint of OpenDiT v1.0.0 to a pipeline. Sizes are read from its tensors."""
    from dit_lora.environment.progress_bar import hide_progress_bars
    from dit_lora.models.video_dit_base import convert_checkpoint

    hide_progress_bars()
    for line in convert_checkpoint(out, weights, heads=heads, vae=vae, text_encoder=text_encoder):
        echo(line)
