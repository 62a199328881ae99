"""Writes example code for the card that loads a published result and samples as the run's validation did."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE
from dit_lora.config.lora import PEFT_ONLY_KINDS
from dit_lora.config.records import Dtype, validate_value
from dit_lora.families import get_family
from dit_lora.hub.contents import PublishedContents
from dit_lora.verify.expert_pair import format_expert_filename

_BASE_PLACEHOLDER = "path/to/base"


def needs_dit_lora(contents: PublishedContents) -> bool:
    """True if stock Diffusers cannot load the result: no LoRA loader, a class of ours, or classes not in the base."""
    pipeline = contents.facts.get("pipeline")
    if pipeline is None:
        return contents.facts["model"]["module"].startswith("dit_lora.")
    is_our_class = pipeline["module"] != "diffusers"
    if contents.kind == "pipeline":
        return is_our_class
    # The code can name another pipeline class; other changes of model_index.json need our loader.
    changes = {*(contents.metadata.get("index") or {})} - {"_class_name"}
    return is_our_class or not pipeline["loads_lora"] or bool(changes)


def build_install_command(contents: PublishedContents) -> str:
    """The pip command that installs what the usage code needs."""
    if needs_dit_lora(contents):
        packages = ["dit-lora"]
    elif "pipeline" in contents.facts:
        # sentencepiece: tokenizers of T5 and other text encoders need it.
        packages = ["torch", "diffusers", "transformers", "peft", "accelerate", "sentencepiece"]
    else:
        packages = ["torch", "transformers", "peft", "accelerate"]
    if "pipeline" in contents.facts:
        packages += get_family(contents.metadata["family"]).pipeline_packages
    if _is_video(contents):
        packages += ["imageio", "imageio-ffmpeg"]
    return f"pip install {' '.join(packages)}"


def render_usage_code(contents: PublishedContents, repo_id: str, prompt: str) -> str:
    """Python source that loads the result from the Hub repository `repo_id` and samples with `prompt`."""
    is_pipeline = "pipeline" in contents.facts
    name = "use_pipeline.jinja" if is_pipeline else "use_chat.jinja"
    base = quote_python_string(contents.base or _BASE_PLACEHOLDER)
    # The revision pins the base to the commit that was trained on.
    if contents.base is not None and contents.metadata.get("revision"):
        base += f", revision={quote_python_string(contents.metadata['revision'])}"
    # Lines that load the adapter, one per expert; none for a full pipeline.
    load_lines = []
    if is_pipeline and contents.kind != "pipeline":
        if needs_dit_lora(contents):
            load_lines = [f"dit_lora.load_adapter(pipe, {quote_python_string(repo_id)})"]
        else:
            load_lines = [_build_load_line(expert, repo_id) for expert in contents.experts or (contents,)]
    # Not autoescaped: the result is Python. Values are inserted by `repr` or as quoted literals.
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = resources.files("dit_lora.hub").joinpath(name).read_text(encoding="utf-8")
    # facts.json of older runs lacks these.
    defaults = {"to_image": False, "is_modular": False, "has_guider": False}
    code = environment.from_string(template).render(
        facts=defaults | contents.facts["pipeline" if is_pipeline else "model"],
        references=list_reference_files(contents.facts.get("pipeline", {})),
        clips=contents.facts.get("pipeline", {}).get("reference_clips", False),
        repo_id=repo_id,
        prompt=prompt,
        base=base,
        on_hub=contents.base is not None,
        base_weights=BASE_FILE if BASE_FILE in contents.files else None,
        has_adapter="adapter_config.json" in contents.files,
        loading=load_lines,
        in_peft_format=_get_adapter_kind(contents) in PEFT_ONLY_KINDS,
        is_whole=contents.kind == "pipeline",
        is_video=_is_video(contents),
        ours=needs_dit_lora(contents),
        dtype=_format_dtype(contents)
        if is_pipeline
        else validate_value(contents.metadata.get("dtype"), Dtype, "the dtype of the result's header"),
        literal=quote_python_string,
        repr=repr,
    )
    return code.rstrip()


def list_reference_files(pipeline: Mapping[str, Any]) -> list[str]:
    """File names for a pipeline's references in code and commands."""
    suffix = "mp4" if pipeline.get("reference_clips") else "png"
    return [f"reference_{number}.{suffix}" for number in range(1, pipeline.get("references", 0) + 1)]


def quote_python_string(text: str) -> str:
    """The text as a Python string literal in double quotes, on one line."""
    return json.dumps(text, ensure_ascii=False)


def _get_adapter_kind(contents: PublishedContents) -> str:
    """The adapter's kind, such as `lora`. Old headers without a kind are of LoRAs."""
    return str(contents.metadata.get("kind", "lora"))


def _build_load_line(contents: PublishedContents, repo_id: str) -> str:
    """Python line that loads one adapter with Diffusers, or with PEFT for kinds that Diffusers cannot read."""
    part = contents.metadata.get("part", "transformer")
    if _get_adapter_kind(contents) in PEFT_ONLY_KINDS:
        return f"PeftModel.from_pretrained(pipe.{part}, {quote_python_string(repo_id)})"
    name = format_expert_filename(contents.expert) if contents.expert else ADAPTER_FILE
    if _get_adapter_kind(contents) == "lokr":
        # `load_lora_weights` supports LoKr in only a few pipelines.
        where = f'weight_name={quote_python_string(name)}, prefix="transformer"'
        return f"pipe.{part}.load_lora_adapter({quote_python_string(repo_id)}, {where})"
    arguments = [quote_python_string(repo_id)]
    arguments += [f"weight_name={quote_python_string(name)}"] if contents.expert else []
    arguments += ["load_into_transformer_2=True"] if part == "transformer_2" else []
    return f"pipe.load_lora_weights({', '.join(arguments)})"


def _is_video(contents: PublishedContents) -> bool:
    pipeline = contents.facts.get("pipeline") or {}
    return pipeline.get("output") == "frames" and bool(pipeline["fps"])


def _format_dtype(contents: PublishedContents) -> str:
    """The `torch_dtype` argument for loading the pipeline: one dtype, or a dict if some components stay in fp32."""
    dtype, fp32_components = (str(contents.facts["pipeline"]["dtype"]), contents.facts["pipeline"]["in_fp32"])
    if not fp32_components or dtype == "torch.float32":
        return dtype
    components = "".join(f'"{name}": torch.float32, ' for name in fp32_components)
    return f'{{{components}"default": {dtype}}}'


def build_sample_command(contents: PublishedContents, repo_id: str, prompt: str) -> Sequence[str]:
    """The `dit-lora sample` command that is equivalent to the usage code; empty for a chat model."""
    if "pipeline" not in contents.facts:
        return ()
    # POSIX quoting: close the quotes, add an escaped quote, open them again.
    quoted = "'" + prompt.replace("'", "'\\''") + "'"
    model = "" if contents.base or contents.kind == "pipeline" else f" --model {_BASE_PLACEHOLDER}"
    files = list_reference_files(contents.facts["pipeline"])
    references = "".join(f" --reference {file}" for file in files)
    return (f"dit-lora sample {repo_id}{model} --prompt {quoted}{references}",)
