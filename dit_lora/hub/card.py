"""Writes the model card of a run, README.md on the Hub, using only the files in the run's folder."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from dit_lora.adapters.diffusers_format import ADAPTER_FILE
from dit_lora.adapters.kinds import describe_adapter
from dit_lora.adapters.peft_format import CHAT_ADAPTER_FILE
from dit_lora.config.experts import EXPERT_NAMES
from dit_lora.errors import format_event_kind, join_first_items
from dit_lora.families import get_family
from dit_lora.hub.contents import VERIFICATION_FILE, CardSample, PublishedContents
from dit_lora.hub.markdown import collapse_whitespace, escape_markdown
from dit_lora.hub.usage import (
    build_install_command,
    build_sample_command,
    list_reference_files,
    needs_dit_lora,
    render_usage_code,
)
from dit_lora.redact import remove_tokens
from dit_lora.verify.expert_pair import format_expert_filename

# Source: huggingface.js, packages/tasks/src/pipelines.ts. Class-conditional video models have no task there.
_VIDEO_TO_VIDEO = "video-to-video"
# By whether samples start from a picture, and the kind of training data.
_DIFFUSION_TASKS = {
    (False, "images"): "text-to-image",
    (False, "clips"): "text-to-video",
    (True, "images"): "image-to-image",
    (True, "clips"): "image-to-video",
}
_CHAT_TASK = "video-text-to-text"
_MEDIA_TEXTS = {"image": "an image", "video": "a video", "text": "text alone"}


def write_card(contents: PublishedContents, repo_id: str) -> str:
    """Text of the model card: YAML metadata for the Hub, then Markdown.

    Captions are escaped so that they are not markup.
    """
    template = resources.files("dit_lora.hub").joinpath("card.md").read_text(encoding="utf-8")
    # The example code uses a validation prompt, so that its result can be compared with the gallery.
    trigger = contents.facts["data"].get("caption_prefix")
    prompts = [card_sample.prompt for card_sample in contents.card_samples]
    prompt = prompts[0] if prompts else trigger or "a prompt of yours"
    # Rows of the table of samples: Markdown of the prompt and of both outputs.
    pairs = [
        {
            "prompt": escape_markdown(card_sample.prompt),
            "before": _format_output(card_sample, "before", card_sample.before),
            "after": _format_output(card_sample, "after", card_sample.after),
        }
        for card_sample in contents.card_samples
    ]
    card = ModelCard.from_template(
        _build_metadata(contents, repo_id),
        template_str=template,
        title=escape_markdown(repo_id.partition("/")[2]),
        summary=_format_card_summary(contents),
        trigger=escape_markdown(trigger) if trigger else None,
        gallery=any(not card_sample.is_text for card_sample in contents.card_samples),
        pairs=pairs,
        install=build_install_command(contents),
        code=remove_tokens(render_usage_code(contents, repo_id, prompt)),
        notes=list(_list_usage_notes(contents)),
        verifications=sorted(name for name in contents.files if name.endswith(VERIFICATION_FILE)),
        commands=list(map(remove_tokens, build_sample_command(contents, repo_id, collapse_whitespace(prompt)))),
        data=list(_list_data_facts(contents)),
        values=list(_list_training_settings(contents)),
        result=list(_list_results(contents)),
        checks=list(_list_checks(contents)),
        versions=list(_list_versions(contents)),
        licence=_format_licence(contents),
    )
    return str(card)


def get_hub_task(contents: PublishedContents) -> str | None:
    """The Hub's name for the model's task; None if the Hub has none."""
    pipeline = contents.facts.get("pipeline")
    if pipeline is None:
        return _CHAT_TASK
    if pipeline["condition"] == "class_labels":
        return None
    kind = contents.facts["data"]["kind"]
    if kind == "clips" and pipeline.get("reference_clips"):
        return _VIDEO_TO_VIDEO
    # Image models that take reference pictures edit them.
    edits = kind == "images" and pipeline.get("references", 0) > 0
    return _DIFFUSION_TASKS.get((pipeline["from_image"] or edits, kind))


def _build_metadata(contents: PublishedContents, repo_id: str) -> ModelCardData:
    # A model trained from scratch only has the base's config, and no licence to inherit.
    base, scratch = contents.base, contents.run.config["model"].get("from_scratch")
    derived = base is not None and scratch is None
    licence = get_family(contents.metadata["family"]).get_license(base) if derived else None
    relation = "finetune" if contents.kind == "pipeline" else "adapter"
    trigger = contents.facts["data"].get("caption_prefix")
    # The Hub's widget shows pictures and videos, each with a text.
    gallery = [
        {"text": remove_tokens(text), "output": {"url": url}}
        for card_sample in contents.card_samples
        if not card_sample.is_text
        for text, url in (
            (card_sample.prompt, card_sample.after),
            (f"before training: {card_sample.prompt}", card_sample.before),
        )
        if url
    ]
    tags = ["dit-lora", str(contents.metadata["family"])]
    if contents.kind != "pipeline":
        tags.append("lora")
    # The Hub's name of the library that loads the result.
    library = "peft" if "adapter_config.json" in contents.files else "transformers"
    if "pipeline" in contents.facts:
        library = "diffusers"
        tags.append("diffusers-training")
        if contents.facts["pipeline"]["condition"] == "class_labels":
            tags.append("class-conditional")
    results = _build_eval_results(contents)
    # `ModelCardData` leaves out entries that are None.
    values: dict[str, Any] = {
        "base_model": base if derived else None,
        "base_model_relation": relation if derived else None,
        "library_name": library,
        "pipeline_tag": get_hub_task(contents),
        "license": licence.id if licence else None,
        "license_name": licence.name if licence else None,
        "license_link": licence.link if licence else None,
        "datasets": contents.facts["data"]["datasets"] or None,
        "tags": tags,
        "instance_prompt": remove_tokens(trigger) if trigger else None,
        "widget": gallery or None,
    }
    if results:
        values |= {"eval_results": results, "model_name": repo_id.partition("/")[2]}
    return ModelCardData(**values)


class _EvalLoss(NamedTuple):
    """A loss at fixed noise before and after training, and what it was measured on."""

    name: str
    data: str
    first_loss: float
    last_loss: float


def _list_eval_losses(contents: PublishedContents) -> list[_EvalLoss]:
    """The losses at fixed noise that were measured at least twice; that of `validation.data` comes last."""
    is_chat = "pipeline" not in contents.facts
    noise = "training samples with noise that training does not use"
    eval_data = "conversations that are never trained on" if is_chat else noise
    results = []
    for name, data, by_step in (
        ("eval loss", eval_data, contents.run.eval_losses),
        ("validation loss", "samples that are never trained on", contents.run.validation_losses),
    ):
        # The first and the last measurement are shown.
        losses = {step: loss for step, loss in by_step.items() if math.isfinite(loss)}
        if len(losses) > 1:
            results.append(_EvalLoss(name, data, losses[min(losses)], losses[max(losses)]))
    return results


def _build_eval_results(contents: PublishedContents) -> list[EvalResult]:
    """The eval loss, or the validation loss, as the Hub's metadata, with what it was measured on.

    Empty without a task, which the Hub requires.
    """
    task, losses = get_hub_task(contents), _list_eval_losses(contents)
    # Two experts have two losses, but the Hub's metadata has only one number.
    if task is None or not losses or contents.experts:
        return []
    # Of held-out samples if they were measured: a reader compares models by it.
    return [
        EvalResult(
            task_type=task,
            dataset_type="custom",
            dataset_name=losses[-1].data,
            metric_type="loss",
            metric_name=losses[-1].name,
            metric_value=round(losses[-1].last_loss, 6),
        )
    ]


def _format_card_summary(contents: PublishedContents) -> str:
    """The model card's first sentence: what was trained, from which base, for how many steps."""
    metadata, task = contents.metadata, get_hub_task(contents)
    base = (
        f"[{escape_markdown(contents.base)}](https://huggingface.co/{contents.base})"
        if contents.base
        else f"{escape_markdown(metadata.get('base_model') or 'a base model')} (a local folder)"
    )
    # Such as `LoRA (rank 16, alpha 16)`.
    adapter = describe_adapter(metadata)
    description = f"{'An' if adapter.startswith('O') else 'A'} {adapter} of {base}"
    adapter_files = {ADAPTER_FILE, CHAT_ADAPTER_FILE, *map(format_expert_filename, EXPERT_NAMES.values())}
    if contents.kind == "pipeline":
        scratch = contents.run.config["model"].get("from_scratch") is not None
        description = f"A model trained from scratch, by the config of {base}" if scratch else f"A fine-tune of {base}"
    # None of the adapter's file names: only base weights were trained.
    elif contents.files.keys().isdisjoint(adapter_files):
        description = f"Trained weights of {base}"
    if contents.expert and contents.kind != "pipeline":
        expert = "both experts" if contents.experts else f"its expert for {_format_expert(contents.expert)}"
        description += f" ({expert})"
    # Both experts' steps, or those of the only run.
    steps = sum(expert_contents.run.num_steps_taken for expert_contents in contents.experts or (contents,))
    return f"{description}{f', for {task}' if task else ''}: {steps:,} steps with dit-lora {metadata['version']}."


def _format_output(sample: CardSample, stage: str, output: str | None) -> str:
    """Markdown for a sample's output: text, image, or link to a video."""
    if not output:
        return ""
    if sample.is_text:
        return escape_markdown(output)
    return f"![{stage}]({output})" if output.endswith(".png") else f"[{stage}]({output})"


def _list_usage_notes(contents: PublishedContents) -> Iterator[str]:
    """Sentences for the model card on what users have to know to load and use the result."""
    pipeline = contents.facts.get("pipeline")
    if contents.base is None and contents.kind != "pipeline":
        yield "The base was a local folder when this was trained; `path/to/base` is where you have it."
    if pipeline and pipeline["from_image"]:
        yield "`first_frame.png` is the video's first frame, at the height and width above."
    if pipeline and pipeline.get("to_image"):
        yield "`last_frame.png` is its last frame, at the same."
    if pipeline and pipeline.get("references"):
        yield _describe_references(pipeline)
    if contents.expert and not contents.experts and contents.kind != "pipeline":
        yield f"It is for the expert for {_format_expert(contents.expert)} only; the other is the base's."
    if pipeline and pipeline["condition"] == "class_labels":
        yield "The label is the row of a class that was trained on; `pipe.labels` has them by name."
    if contents.metadata.get("continued"):
        yield f"Training continued from the LoRA {escape_markdown(contents.metadata['continued']['name'])}."
    # `lora.under` of the recipe: adapters that were active and frozen during training.
    for frozen in contents.metadata.get("under") or ():
        use = "load it together with this one" if frozen["in_samples"] else "it is not needed to use this one"
        name = escape_markdown(frozen["name"])
        yield f"It was trained over the frozen adapter {name}, scale {frozen['scale']:g}; {use}."
    if contents.metadata.get("samples_from"):
        model = escape_markdown(contents.metadata["samples_from"])
        yield f"The samples were made with this adapter in {model}, not in its base."
    if pipeline is None:
        yield "Questions are put by the model's own processor and chat template."
    if needs_dit_lora(contents):
        yield "Diffusers and Transformers cannot load it without dit-lora."


def _describe_references(pipeline: Mapping[str, Any]) -> str:
    # The same names as in the example code.
    files = list_reference_files(pipeline)
    named = ", ".join(f"`{file}`" for file in files)
    verb_phrase = "is what the sample is made from" if len(files) == 1 else "are what the sample is made from"
    if pipeline.get("reference_clips"):
        frames, fps = pipeline["arguments"]["num_frames"], pipeline["fps"]
        return f"{named} {verb_phrase}: a clip of {frames} frames or more at {fps:g} frames a second."
    side = pipeline.get("reference_resolution")
    if side is None:
        return f"{named} {verb_phrase}, in the order of training."
    scaling = f"scaled to {side} x {side} pixels' worth where they had more"
    return f"{named} {verb_phrase}, in the order of training, in which they were {scaling}."


def _list_data_facts(contents: PublishedContents) -> Iterator[str]:
    data = contents.facts["data"]
    samples = f"{data['samples']:,}"
    # Chat models count conversations and tokens, diffusion models clips and samples.
    if data["kind"] == "conversations":
        media = ", ".join(f"{count:,} about {_MEDIA_TEXTS[kind]}" for kind, count in data["by_media"].items())
        yield f"{samples} conversations: {media}; {data['answer_tokens']['sum']:,} answer tokens"
    else:
        cut = "" if data["samples"] == data["clips"] else f", cut into {samples} samples"
        yield f"{data['clips']:,} {data['kind']}{cut}"
    if data["seconds"]:
        yield f"seconds of a clip: {_format_range(data['seconds'])}; {data['seconds']['sum']:,g} in all"
    if data.get("shapes"):
        shapes = [f"{shape} ({count:,})" for shape, count in data["shapes"].items()]
        yield f"frames x height x width, with their samples: {join_first_items(shapes, 12)}"
    if data.get("caption_words") and "distinct_captions" in data:
        distinct = data["distinct_captions"]
        yield f"words of a caption: {_format_range(data['caption_words'])}; {distinct:,} captions are distinct"
    if data.get("references"):
        counts = [f"{number} ({count:,})" for number, count in data["references"].items()]
        yield f"references of a clip, with their clips: {', '.join(counts)}"
    if data.get("masked"):
        mask_floor = float(contents.run.config["data"].get("mask_floor", 0.0))
        yield f"{data['masked']:,} have a mask: what it leaves out counts {mask_floor:g} times in the loss"
    if data.get("classes"):
        yield f"{data['classes']:,} classes"
    for name in data["datasets"]:
        yield f"dataset: [{escape_markdown(name)}](https://huggingface.co/datasets/{name})"
    if data["left_out"]:
        yield f"{data['left_out']:,} samples could not be used and were left out before training"


def _format_range(values: Mapping[str, float]) -> str:
    if values["least"] == values["most"]:
        return f"{values['least']:g}"
    return f"{values['least']:g} to {values['most']:g}, median {values['median']:g}"


def _list_training_settings(contents: PublishedContents) -> Iterator[tuple[str, str]]:
    config = contents.run.config
    train, optim = config["train"], config["optim"]
    if contents.kind != "pipeline" and contents.metadata.get("rank"):
        dropout = contents.metadata.get("dropout", 0.0)
        yield ("rank, alpha, dropout", f"{contents.metadata['rank']}, {contents.metadata['alpha']}, {dropout:g}")
    # Groups that are None are not trained.
    for name, group in optim["groups"].items():
        if group and "lr" in group:
            yield f"learning rate of {escape_markdown(name)}", f"{group['lr']:g}"
    yield "optimizer", escape_markdown(optim["name"])
    yield ("schedule, warmup steps", f"{escape_markdown(optim['schedule'])}, {optim['warmup_steps']:,}")
    ranks = contents.run.environment.get("processes", 1)
    yield "samples of a step", f"{train['batch_size']} x {train['accumulate']} accumulated x {ranks} processes"
    for expert_contents in contents.experts or (contents,):
        suffix = f" of the expert for {_format_expert(expert_contents.expert)}" if expert_contents.expert else ""
        # A running total: the last value is the number of samples of the run.
        sample_counts = expert_contents.run.metrics.get_metric_column("samples")
        num_samples = f" ({int(sample_counts[-1]):,} samples)" if sample_counts else ""
        yield f"steps{suffix}", f"{expert_contents.run.num_steps_taken:,}{num_samples}"
    yield "seed", str(train["seed"])
    if train.get("ema"):
        yield "weights' moving average", f"{train['ema']:g}"
    yield "caption dropout", f"{config['data']['caption_dropout']:g}"
    yield "precision", escape_markdown(contents.metadata["dtype"].removeprefix("torch."))
    if contents.metadata.get("quantize"):
        yield "base stored as", escape_markdown(contents.metadata["quantize"])


def _list_results(contents: PublishedContents) -> Iterator[str]:
    # Two experts: one list for each run, with the expert's name in front.
    for expert_contents in contents.experts:
        yield from (f"{_format_expert(expert_contents.expert)}: {line}" for line in _list_results(expert_contents))
    if contents.experts:
        return
    losses = [loss for loss in contents.run.metrics.get_metric_column("loss") if math.isfinite(loss)]
    if losses:
        # A single step's loss is too noisy.
        recent = losses[-50:]
        yield f"training loss, mean of the last {len(recent)} steps: {sum(recent) / len(recent):.4f}"
    for name, data, first_loss, last_loss in _list_eval_losses(contents):
        change = f" ({100 * (last_loss / first_loss - 1):+.1f} %)" if first_loss else ""
        yield f"{name} ({data}): {first_loss:.4f} before, {last_loss:.4f} after{change}"
    yield from _list_events(contents)


def _list_events(contents: PublishedContents) -> Iterator[str]:
    """Model card list items on the guard's events, as counts, because their messages may contain file names."""
    # Events that agree in kind, cause and action become one line.
    counted = Counter(
        (
            format_event_kind(str(event.get("kind", ""))),
            str((event.get("verdict") or {}).get("cause", "")).replace("_", " "),
            str(event.get("action") or "none"),
        )
        for event in contents.run.events
    )
    if not counted:
        yield "guard: no step failed"
    for (kind, cause, action), count in counted.most_common():
        times = "once" if count == 1 else f"{count:,} times"
        guard_event = f"{escape_markdown(kind)}, cause {escape_markdown(cause)}"
        yield f"guard: {guard_event}: {times}; action: {escape_markdown(action)}"
    # A sample can be left out several times.
    left_out = len({line.get("sample_id") for line in contents.run.quarantine})
    if left_out:
        yield f"{left_out:,} of the samples left out by the guard, temporarily or permanently"


def _format_expert(expert: str | None) -> str:
    return str(expert).replace("_", " ")


def _format_licence(contents: PublishedContents) -> str:
    """A sentence of the model card on the license of the base, as far as it is known."""
    licence = get_family(contents.metadata["family"]).get_license(contents.base)
    if contents.base is None:
        return "Not stated: the base model was a local folder. What is derived from it is under its licence."
    where = f"[{escape_markdown(contents.base)}](https://huggingface.co/{contents.base})"
    if licence is None:
        return f"Not stated: see the licence of the base model, {where}, from which this is derived."
    # Custom licences have a name and a link, standard ones only an id.
    name = escape_markdown(licence.name or licence.id)
    named = f"[{name}]({licence.link})" if licence.link else name
    return f"{named}, the licence of the base model, {where}, from which this is derived."


def _list_checks(contents: PublishedContents) -> Iterator[tuple[str, str, str]]:
    """Table rows of the verification for the model card: name, outcome, message."""
    for expert in contents.experts:
        for name, passed, message in _list_checks(expert):
            yield f"{_format_expert(expert.expert)}: {name}", passed, message
    # The published copy, in which paths are redacted.
    record = contents.files.get(VERIFICATION_FILE)
    checks = json.loads(record)["checks"] if isinstance(record, bytes) else {}
    for name, check in checks.items():
        message = escape_markdown(str(check.get("words", "")))
        yield escape_markdown(name), "passed" if check.get("passed") else "failed", message


def _list_versions(contents: PublishedContents) -> Iterator[str]:
    environment = contents.run.environment
    packages = environment.get("packages") or {}
    main_packages = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors")
    listed = [f"{name} {packages[name]}" for name in main_packages if name in packages]
    python = environment.get("python", "")
    yield escape_markdown(f"dit-lora {contents.metadata['version']}, Python {python}, " + ", ".join(listed))
    # Such as "8 x NVIDIA H100".
    names = Counter(str(device.get("name")) for device in environment.get("devices") or ())
    hardware = ", ".join(f"{count} x {name}" for name, count in names.items()) or "CPU"
    cuda = environment.get("torch_cuda")
    yield escape_markdown(f"{hardware}{f', CUDA {cuda}' if cuda else ''}")
    seconds = [value for value in contents.run.metrics.get_metric_column("seconds") if math.isfinite(value)]
    if seconds:
        spent = sum(seconds)
        duration = f"{spent / 3600:.1f} hours" if spent > 5400 else f"{spent / 60:.1f} minutes"
        yield f"{duration} in steps"
