"""The `dit-lora` command: each verb a thin call. Heavy imports wait inside the verbs."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli import chat as cli_chat
from dit_lora.cli import convert, export, init, plan, push, quarantine
from dit_lora.cli import report as cli_report
from dit_lora.cli import verify as cli_verify
from dit_lora.cli.completion import Overrides, RecipeFile, recipe_files, tiny_variants
from dit_lora.cli.help import EPILOG, arrange
from dit_lora.cli.json_output import JsonFlag, print_json, silence_the_end
from dit_lora.errors import CheckFailedError, DitLoraError, reported_errors
from dit_lora.families import every_family
from dit_lora.terminal import echo
from dit_lora.version import __version__

app = typer.Typer(
    name="dit-lora",
    help="LoRA fine-tuning of diffusion transformers that does not die of NaN.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the console script: errors are one line and an exit code."""
    with reported_errors():
        try:
            app()
        finally:
            if "--json" in sys.argv[1:]:
                silence_the_end()


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        echo(__version__)
        raise typer.Exit


@app.command()
def doctor(
    context: typer.Context,
    as_json: JsonFlag = False,
    config_file: Annotated[
        Path | None, typer.Option(help="The accelerate config that you launch with.")
    ] = None,
) -> None:
    """Show versions, device and what a run will use and why; exit 1 if a run would be refused."""
    from dit_lora.cli.doctor import render, report
    from dit_lora.environment.versions import probe_environment

    account = report(probe_environment(), config_file)
    if as_json:
        print_json(context, account)
    else:
        render(account)
    if not account["ok"]:
        raise typer.Exit(CheckFailedError.exit_code)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True)
    except FileExistsError as error:
        raise DitLoraError(f"{out} exists; choose another folder or remove it") from error
    except OSError as error:
        raise DitLoraError(f"cannot make {out}: {error.strerror}") from error


@app.command()
def families() -> None:
    """List the model families and the tiny checkpoints that can be built of each."""
    for name, family in every_family().items():
        echo(f"{name}: tiny {', '.join(family.tiny_variants)}")


@app.command()
def tiny(
    variant: Annotated[
        str,
        typer.Argument(
            help="For instance cogvideox-2b; see `families`.", autocompletion=tiny_variants
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    seed: Annotated[int, typer.Option(help="Equal seeds give equal bytes.")] = 0,
) -> None:
    """Build a complete random checkpoint, small enough for a CPU, without the Hub."""
    families = every_family().values()
    family_of = {name: family for family in families for name in family.tiny_variants}
    if variant not in family_of:
        raise DitLoraError(f"no tiny checkpoint {variant!r}; known: {', '.join(family_of)}")
    from dit_lora.training.session.session import quiet_libraries

    _make_folder(out)
    quiet_libraries()
    family_of[variant].build_tiny(variant, out, seed)
    echo(f"wrote {out}")


@app.command()
def shapes(
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    clips: Annotated[int, typer.Option(min=1)] = 6,
    frames: Annotated[
        int | None, typer.Option(min=1, help="1 for images (PNG); by default 17, of --classes 1.")
    ] = None,
    height: Annotated[int, typer.Option(min=16, help="Pixels, even.")] = 64,
    width: Annotated[int, typer.Option(min=16, help="Pixels, even.")] = 96,
    fps: Annotated[float, typer.Option(min=1, max=240)] = 8.0,
    classes: Annotated[bool, typer.Option("--classes", help="One folder a class.")] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Questions in place of captions; as many images again.")
    ] = False,
) -> None:
    """Write captioned clips of moving shapes (H.264), to try things on; images with --frames 1 or --classes."""
    from dit_lora.data.synthetic.clips import write_class_folders, write_shapes
    from dit_lora.data.synthetic.conversations import write_conversations

    if chat and (classes or frames == 1):
        raise DitLoraError("--chat writes clips and images; leave out --classes and --frames 1")
    frames = frames or (1 if classes else 17)
    if frames > 1 and (height % 2 or width % 2):
        raise DitLoraError(f"H.264 takes even sizes; got {height}x{width}")
    _make_folder(out)
    size = {"height": height, "width": width, "frames": frames}
    if classes:
        write_class_folders(out, images=clips, fps=fps, **size)
    elif chat:
        write_conversations(out, clips=clips, images=clips, fps=fps, **size)
    else:
        write_shapes(out, clips=clips, frames=frames, height=height, width=width, fps=fps)
    what = "clips and as many images" if chat else "images" if frames == 1 else "clips"
    echo(f"wrote {clips} {what} to {out}")


@app.command()
def sample(
    target: Annotated[
        Path, typer.Argument(help="A run's folder, an adapter, or its OWNER/NAME on the Hub.")
    ],
    prompt: Annotated[list[str], typer.Option(help="Or a class's name. Repeat for several.")],
    model: Annotated[
        str | None, typer.Option(help="Base checkpoint; by default the run's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    frames: Annotated[int | None, typer.Option(help="By default as trained.")] = None,
    height: Annotated[int | None, typer.Option(help="By default as trained.")] = None,
    width: Annotated[int | None, typer.Option(help="By default as trained.")] = None,
    fps: Annotated[
        float | None, typer.Option(min=1, max=240, help="By default as trained.")
    ] = None,
    inference_steps: Annotated[int, typer.Option(min=1)] = 50,
    guidance_scale: Annotated[float, typer.Option(min=1)] = 6.0,
    image: Annotated[Path | None, typer.Option(help="First frame, for image-to-video.")] = None,
    out: Annotated[Path | None, typer.Option(help="By default beside the adapter.")] = None,
) -> None:
    """Sample one mp4 (or image) a prompt with an adapter, or a trained model, in the stock pipeline."""
    from dit_lora.commands.sample import SampleRequest
    from dit_lora.commands.sample import sample as run_sample

    request = SampleRequest(
        target=target,
        prompts=tuple(prompt),
        model=model,
        seed=seed,
        frames=frames,
        height=height,
        width=width,
        fps=fps,
        inference_steps=inference_steps,
        guidance_scale=guidance_scale,
        image=image,
        out=out,
    )
    for path in run_sample(request):
        echo(path)


@app.command()
def faults(
    context: typer.Context,
    as_json: JsonFlag = False,
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Processes that torchrun starts.")] = 1,
    only: Annotated[
        str | None, typer.Option(help="A pattern of names, for instance '*latent*'.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="The tiny checkpoint, as `dit-lora tiny` names it.")
    ] = "cogvideox-5b",
    engine: Annotated[
        str, typer.Option(help="How several ranks share a step: ddp, fsdp2 or zero2.")
    ] = "ddp",
) -> None:
    """Inject faults into tiny runs and show what the guard makes of each; exit 1 if it fails at one."""
    from dit_lora.cli.faults_table import render
    from dit_lora.faults.suite import run_suite, totals
    from dit_lora.faults.world import engine_of

    judged = run_suite(only, ranks, model, engine_of(engine))
    if as_json:
        lines = [asdict(judgment) for judgment in judged]
        print_json(context, {"faults": lines, "totals": totals(judged)})
    else:
        render(judged)
    if not all(judgment.passed for judgment in judged):
        raise typer.Exit(CheckFailedError.exit_code)


@app.command()
def audit(
    target: Annotated[
        str,
        typer.Argument(
            help="A recipe (.yaml), or a folder, .tar or dataset of its own.",
            autocompletion=recipe_files,
        ),
    ],
    overrides: Overrides = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every verdict.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures.")] = None,
    fix_list: Annotated[
        Path | None, typer.Option(help="Write what to do about each file, tab separated.")
    ] = None,
    encode: Annotated[
        bool, typer.Option("--encode", help="Of a recipe: fill its cache, and look at that too.")
    ] = False,
) -> None:
    """Decode every clip and judge it, with its caption or class; exit 1 if training would refuse one."""
    from dit_lora.commands.audit import audit_target
    from dit_lora.data.audit.summary import as_json, write_fix_list, write_json
    from dit_lora.report.audit.page import write_audit_page

    result = audit_target(target, overrides or [], encode=encode)
    for line in result.lines():
        echo(line, err=json_file == Path("/dev/stdout"))
    judged, notes, buckets, encoded = result.judged, result.notes, result.buckets, result.encoded
    try:
        if json_file:
            whole = as_json(judged, notes=notes, buckets=buckets, encoded=encoded)
            write_json(json_file, whole)
        if fix_list:
            write_fix_list(fix_list, judged)
    except OSError as error:
        raise DitLoraError(f"cannot write {error.filename}: {error.strerror}") from error
    if html:
        write_audit_page(
            html,
            judged,
            title=result.title,
            totals=result.totals,
            notes=notes,
            buckets=buckets,
            encoded=encoded,
        )
    if not result.passed:
        raise typer.Exit(CheckFailedError.exit_code)


cache = typer.Typer(help="Fill, check and tidy the cache of encoded clips and captions.")
app.add_typer(cache, name="cache", no_args_is_help=True)
CacheTarget = Annotated[
    str,
    typer.Argument(help="A recipe (.yaml), or a cache's folder.", autocompletion=recipe_files),
]


@cache.command("build")
def cache_build(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Encode everything that a recipe trains on; `accelerate launch -m dit_lora cache build` shares the work."""
    from dit_lora.commands.cache import build

    build(recipe, overrides or [])


@cache.command("verify")
def cache_verify(
    context: typer.Context,
    target: CacheTarget,
    overrides: Overrides = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Mark bad entries, to be made anew.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Read every entry: digest, finite, in range; exit 1 if one is bad."""
    from dit_lora.commands.cache import verify

    result = verify(target, overrides or [], set_aside=set_aside)
    if as_json:
        print_json(context, result.record())
    else:
        echo(result.told())
    if not result.passed:
        raise typer.Exit(CheckFailedError.exit_code)


@cache.command("stats")
def cache_stats(
    context: typer.Context,
    target: CacheTarget,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
) -> None:
    """Count entries, files and bytes, by kind."""
    from dit_lora.commands.cache import stats

    result = stats(target, overrides or [])
    if as_json:
        print_json(context, result.record())
    else:
        echo(result.told())


@cache.command("prune")
def cache_prune(
    context: typer.Context,
    target: CacheTarget,
    overrides: Overrides = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Remove what this recipe does not use; repeat for each that stays."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove bad and double entries and leftovers; with --keep, also what no such recipe uses."""
    from dit_lora.commands.cache import prune

    result = prune(target, overrides or [], keep=keep or [])
    if as_json:
        print_json(context, result.record())
    else:
        echo(result.told())


convert.register(app)
cli_chat.register(app)
export.register(app)
plan.register(app)
push.register(app)
quarantine.register(app)
cli_report.register(app)
init.register(app)
cli_verify.register(app)


@app.command()
def replay(
    context: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="A folder below a run's bundles/.")],
    model: Annotated[
        str | None, typer.Option(help="Base checkpoint; by default the one of the run beside it.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1.")] = None,
    fp32: Annotated[bool, typer.Option("--fp32", help="Weights and compute in fp32.")] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Switch this off, for instance attention:flash; repeatable."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the micro-batch of an event again and name the cause; exit 1 if it is still not healthy."""
    from dit_lora.commands.replay import replay_bundle

    result = replay_bundle(bundle, model=model, device=device, fp32=fp32, without=without or [])
    if as_json:
        print_json(context, result.record())
    else:
        echo(result.told())
    if result.verdict is not None:
        raise typer.Exit(CheckFailedError.exit_code)


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, with which editors complete and check them."""
    from dit_lora.config.load import recipe_schema

    echo(json.dumps(recipe_schema(), indent=2))


arrange(app)
