"""The pages for users of other trainers: every flag of theirs has a row, and every key of ours is one."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from diffusers import CogVideoXPipeline
from launching import ROOT
from peft import LoraConfig, get_peft_model_state_dict
from pydantic import BaseModel
from safetensors.torch import save_file
from trainer_options import (
    AI_TOOLKIT,
    MUSUBI,
    MUSUBI_KEYS,
    MUSUBI_PROMPTS,
    SIMPLETUNER,
    SIMPLETUNER_CLASSES,
    SIMPLETUNER_KEYS,
)
from typer.testing import CliRunner

from dit_lora.adapters.lora_file import read_lora
from dit_lora.cli.app import app
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.families import get_family

DOCS = ROOT / "docs"

# As their parsers name them; read on 2026-11-22.
# huggingface/diffusers 02303d1c, examples/cogvideo/train_cogvideox_lora.py
TEXT_TO_VIDEO = """
    pretrained_model_name_or_path revision variant cache_dir dataset_name dataset_config_name instance_data_root
    video_column caption_column id_token dataloader_num_workers validation_prompt validation_prompt_separator
    num_validation_videos validation_epochs guidance_scale use_dynamic_cfg seed rank lora_alpha mixed_precision
    output_dir height width video_reshape_mode fps max_num_frames skip_frames_start skip_frames_end random_flip
    train_batch_size num_train_epochs max_train_steps checkpointing_steps checkpoints_total_limit
    resume_from_checkpoint gradient_accumulation_steps gradient_checkpointing learning_rate scale_lr lr_scheduler
    lr_warmup_steps lr_num_cycles lr_power enable_slicing enable_tiling optimizer use_8bit_adam adam_beta1
    adam_beta2 prodigy_beta3 prodigy_decouple adam_weight_decay adam_epsilon max_grad_norm
    prodigy_use_bias_correction prodigy_safeguard_warmup tracker_name push_to_hub hub_token hub_model_id
    logging_dir allow_tf32 report_to"""
# huggingface/diffusers 05c81856, examples/cogvideo/train_cogvideox_image_to_video_lora.py: what is there besides
IMAGE_TO_VIDEO = "validation_images noised_image_dropout nccl_timeout"
# huggingface/diffusers 071190da, examples/dreambooth/train_dreambooth_lora_sana.py
SANA = """
    pretrained_model_name_or_path revision variant dataset_name dataset_config_name instance_data_dir cache_dir
    image_column caption_column repeats class_data_dir instance_prompt class_prompt max_sequence_length
    complex_human_instruction validation_prompt num_validation_images validation_epochs rank lora_alpha
    lora_dropout with_prior_preservation prior_loss_weight num_class_images output_dir seed resolution center_crop
    random_flip train_batch_size sample_batch_size num_train_epochs max_train_steps checkpointing_steps
    checkpoints_total_limit resume_from_checkpoint gradient_accumulation_steps gradient_checkpointing
    learning_rate scale_lr lr_scheduler lr_warmup_steps lr_num_cycles lr_power dataloader_num_workers
    weighting_scheme logit_mean logit_std mode_scale optimizer use_8bit_adam adam_beta1 adam_beta2 prodigy_beta3
    prodigy_decouple adam_weight_decay adam_weight_decay_text_encoder lora_layers adam_epsilon
    prodigy_use_bias_correction prodigy_safeguard_warmup max_grad_norm push_to_hub hub_token hub_model_id
    logging_dir allow_tf32 cache_latents report_to mixed_precision upcast_before_saving offload local_rank
    enable_vae_tiling enable_npu_flash_attention"""
# zai-org/CogVideo 193b1f4d, finetune/schemas/args.py
COGVIDEO = """
    model_path model_name model_type training_type output_dir data_root caption_column video_column
    train_resolution report_to seed train_epochs train_steps gradient_accumulation_steps batch_size learning_rate
    optimizer beta1 beta2 beta3 epsilon weight_decay max_grad_norm lr_scheduler lr_warmup_steps lr_num_cycles
    lr_power num_workers pin_memory image_column mixed_precision gradient_checkpointing enable_slicing
    enable_tiling nccl_timeout rank lora_alpha target_modules checkpointing_steps checkpointing_limit
    resume_from_checkpoint do_validation validation_steps teacher_model_path teacher_model_num_classes
    kd_loss_weight validation_dir validation_prompts validation_images validation_videos gen_fps"""
# THUDM/CogVideo 19e6d244, sat/configs/sft.yaml
SAT = """
    args.checkpoint_activations args.model_parallel_size args.experiment_name args.mode args.load
    args.no_load_rng args.train_iters args.eval_iters args.eval_interval args.eval_batch_size args.save
    args.save_interval args.log_interval args.train_data args.valid_data args.split args.num_workers
    args.force_train args.only_log_video_latents data.params.video_size data.params.fps
    data.params.max_num_frames data.params.skip_frms_num deepspeed.train_micro_batch_size_per_gpu
    deepspeed.gradient_accumulation_steps deepspeed.steps_per_print deepspeed.gradient_clipping
    deepspeed.zero_optimization deepspeed.zero_allow_untested_optimizer deepspeed.bf16 deepspeed.fp16
    deepspeed.loss_scale deepspeed.loss_scale_window deepspeed.hysteresis deepspeed.min_loss_scale
    deepspeed.optimizer deepspeed.activation_checkpointing deepspeed.wall_clock_breakdown"""
# a-r-r-o-w/finetrainers 1b236671, finetrainers/args.py; then its SFT options (neph1/finetrainers 3ef07fc9) and its
# control options (170f1d31)
FINETRAINERS = """
    parallel_backend pp_degree dp_degree dp_shards cp_degree tp_degree model_name pretrained_model_name_or_path
    revision variant cache_dir tokenizer_id tokenizer_2_id tokenizer_3_id text_encoder_id text_encoder_2_id
    text_encoder_3_id transformer_id vae_id text_encoder_dtype text_encoder_2_dtype text_encoder_3_dtype
    transformer_dtype vae_dtype layerwise_upcasting_modules layerwise_upcasting_storage_dtype
    layerwise_upcasting_skip_modules_pattern dataset_config dataset_shuffle_buffer_size enable_precomputation
    precomputation_items precomputation_dir precomputation_once precomputation_reuse dataloader_num_workers
    pin_memory flow_resolution_shifting flow_base_seq_len flow_max_seq_len flow_base_shift flow_max_shift
    flow_shift flow_weighting_scheme flow_logit_mean flow_logit_std flow_mode_scale training_type seed batch_size
    train_steps max_data_samples gradient_accumulation_steps gradient_checkpointing checkpointing_steps
    checkpointing_limit resume_from_checkpoint enable_slicing enable_tiling lr lr_scheduler lr_warmup_steps
    lr_num_cycles lr_power optimizer beta1 beta2 beta3 weight_decay epsilon max_grad_norm validation_dataset_file
    validation_steps enable_model_cpu_offload enable_group_offload group_offload_type
    group_offload_blocks_per_group group_offload_use_stream tracker_name push_to_hub hub_token hub_model_id
    output_dir logging_dir logging_steps init_timeout nccl_timeout report_to verbose compile_modules
    compile_scopes allow_tf32 float32_matmul_precision attn_provider_training attn_provider_inference list_models
    rank lora_alpha target_modules
    control_type train_qk_norm frame_conditioning_type frame_conditioning_index"""

PAGES = {
    "migrate_diffusers.md": f"{TEXT_TO_VIDEO} {IMAGE_TO_VIDEO} {SANA}",
    "migrate_cogvideo.md": COGVIDEO,
    "migrate_finetrainers.md": FINETRAINERS,
}
# Of each page its options, and how many of what it says that it has.
OPTIONS = {
    "migrate_ai_toolkit.md": (AI_TOOLKIT, {"all {} keys": len(AI_TOOLKIT)}),
    "migrate_musubi.md": (
        [*MUSUBI, *MUSUBI_KEYS, *MUSUBI_PROMPTS],
        {
            "all {} options": len(MUSUBI),
            "The {} keys of a data set": len(MUSUBI_KEYS) - 6,
            "the {} of a line of prompts": len(MUSUBI_PROMPTS),
        },
    ),
    "migrate_simpletuner.md": (
        [*SIMPLETUNER, *SIMPLETUNER_KEYS],
        {
            "all {} options": len(SIMPLETUNER),
            "{} of them as eight classes": len(SIMPLETUNER_CLASSES),
            "the {} keys of a data set": len(SIMPLETUNER_KEYS),
        },
    ),
}
EVERY_PAGE = [*PAGES, *OPTIONS]
# Keys of edit data and of sound, which are made at the same time as these pages: take them out once they are there.
COMING = {
    "data.alpha_mask",
    "data.mask_column",
    "data.mask_floor",
    "data.mask_folder",
    "data.reference_columns",
    "data.reference_folders",
    "data.reference_resolution",
    "data.sound",
    "data.sources[].alpha_mask",
    "data.sources[].mask_column",
    "data.sources[].mask_folder",
    "data.sources[].reference_columns",
    "data.sources[].reference_folders",
    "validation.references",
}
_CODE = re.compile(r"`([^`]+)`")
_SECTIONS = "|".join(Recipe.model_fields)
_KEY = re.compile(rf"((?:{_SECTIONS})(?:\.[a-z_]+(?:\[\])?)+)(?:[=:].*)?")


def rows(page: str) -> Iterator[list[str]]:
    """Cells of the rows whose first cell is a flag, or a key of a config."""
    for line in (DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            yield cells


def named(page: str) -> list[str]:
    """Options in the first cells of a page, as they are written there."""
    return [name for cells in rows(page) for name in _CODE.findall(cells[0])]


def whole(name: str, options: list[str]) -> list[str]:
    """The options that a name stands for: itself, or all with the beginning before its `*`."""
    beginning = name.removesuffix("*")
    return [name] if name == beginning else [option for option in options if option.startswith(beginning)]


def fields(config: Any) -> dict[str, Any]:
    """The fields of a section, of an optional one, or of the sections in a list."""
    if isinstance(config, type) and issubclass(config, BaseModel):
        return {name: field.annotation for name, field in config.model_fields.items()}
    return {name: inner for part in get_args(config) for name, inner in fields(part).items()}


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_of_theirs_has_one_row(page: str) -> None:
    flags = [flag[2:] for flag in named(page) if flag[:2] == "--"]
    assert sorted(flags) == sorted(set(PAGES[page].split()))


@pytest.mark.parametrize("page", OPTIONS)
def test_every_option_of_theirs_has_one_row_and_is_counted(page: str) -> None:
    options, counts = OPTIONS[page]
    option_names = [option for name in named(page) for option in whole(name.removeprefix("--"), options)]
    assert sorted(option_names) == sorted(options)
    text = " ".join((DOCS / page).read_text().split())
    assert [sentence for sentence, count in counts.items() if sentence.format(count) not in text] == []


def test_every_key_of_sat_has_one_row() -> None:
    keys = named("migrate_cogvideo.md")
    assert sorted(key for key in keys if not key.startswith(("--", "model."))) == sorted(SAT.split())


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_every_row_has_an_answer(page: str) -> None:
    unanswered = [
        cells
        for cells in rows(page)
        if not re.match(r"not (needed|offered)$", cells[1])
        and not all(_KEY.fullmatch(word) for word in _CODE.findall(cells[1]) or [""])
    ]
    assert not unanswered


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_every_key_of_ours_exists(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (DOCS / page).read_text(), flags=re.M | re.S)
    for cells in rows(page):  # theirs, which may look like ours
        text = text.replace(cells[0], "", 1)
    keys = {match[1] for word in _CODE.findall(text) if (match := _KEY.fullmatch(word))}
    assert len(keys) > 25
    unknown = []
    for key in sorted(keys - COMING):
        config: Any = Recipe
        for name in key.replace("[]", "").split("."):
            known_fields = fields(config)
            if name not in known_fields:
                unknown.append(key)
                break
            config = known_fields[name]
    assert not unknown


def test_what_their_defaults_are_said_to_be_is_what_the_recipes_hold() -> None:
    """The last columns of "Defaults and numerics"."""
    video = yaml.safe_load((ROOT / "recipes/cogvideox/5b_t2v.yaml").read_text())
    images = yaml.safe_load((ROOT / "recipes/sana/600m_512.yaml").read_text())
    assert (video["lora"]["rank"], video["lora"]["alpha"], images["lora"]["rank"]) == (64, 64, 16)
    assert video["data"]["caption_dropout"] == 0.1
    assert video["optim"]["groups"]["adapter"]["lr"] == 1e-4
    assert (video["optim"]["clip"], video["train"]["batch_size"]) == (1.0, 1)


def test_an_adapter_without_alpha_is_corrected_by_a_weight(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As CogVideo's trainer and Diffusers' script save one: trained at alpha / rank 0.5, which no file says."""
    base = tiny_checkpoints["cogvideox-2b"]
    torch.manual_seed(0)
    pipe = CogVideoXPipeline.from_pretrained(base)
    targets = ["to_k", "to_q", "to_v", "to_out.0"]
    pipe.transformer.add_adapter(LoraConfig(r=8, lora_alpha=4, target_modules=targets))
    for name, parameter in pipe.transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    layers = get_peft_model_state_dict(pipe.transformer)
    CogVideoXPipeline.save_lora_weights(tmp_path / "theirs", transformer_lora_layers=layers)
    inputs = {
        "hidden_states": torch.randn(1, 3, 4, 4, 6),
        "encoder_hidden_states": torch.randn(1, 226, 32),
        "timestep": torch.tensor([400]),
    }

    def output(adapter: Path) -> torch.Tensor:
        loaded = CogVideoXPipeline.from_pretrained(base)
        loaded.load_lora_weights(adapter)
        with torch.no_grad():
            return loaded.transformer(**inputs, return_dict=False)[0]

    with torch.no_grad():
        trained = pipe.transformer(**inputs, return_dict=False)[0]
    folder = tmp_path / "corrected"
    args = ["--to", "diffusers", "--weight", "0.5", "--model", str(base), "--out", str(folder)]
    result = CliRunner().invoke(app, ["export", str(tmp_path / "theirs"), *args])
    assert result.exit_code == 0, result.output
    relative_error = (output(tmp_path / "theirs") - trained).norm() / trained.norm()
    assert relative_error > 0.01
    torch.testing.assert_close(output(folder), trained, rtol=1e-4, atol=1e-5)


_QKV = tuple(f"transformer_blocks.0.attn.to_{projection}" for projection in "qkv")
_PEFT, _KOHYA = ("lora_A", "lora_B"), ("lora_down", "lora_up")


@pytest.mark.parametrize(
    ("page", "variant", "key", "layers", "matrices", "alpha"),
    [
        ("ai_toolkit", "flux-dev", f"transformer.{_QKV[0]}", _QKV[:1], _PEFT, None),
        (
            "ai_toolkit",
            "flux2-klein",
            "diffusion_model.double_blocks.0.img_attn.qkv",
            _QKV,
            _PEFT,
            None,
        ),
        (
            "ai_toolkit",
            "wan-2.1-t2v",
            "diffusion_model.blocks.0.self_attn.q",
            ("blocks.0.attn1.to_q",),
            _PEFT,
            None,
        ),
        (
            "musubi",
            "wan-2.1-t2v",
            "lora_unet_blocks_0_self_attn_q",
            ("blocks.0.attn1.to_q",),
            _KOHYA,
            6.0,
        ),
        ("musubi", "flux-dev", "lora_unet_double_blocks_0_img_attn_qkv", _QKV, _KOHYA, 6.0),
        ("musubi", "flux2-klein", "lora_unet_double_blocks_0_img_attn_qkv", _QKV, _KOHYA, 6.0),
        ("simpletuner", "flux-dev", f"transformer.{_QKV[0]}", _QKV[:1], _PEFT, None),
        ("simpletuner", "flux-dev", f"diffusion_model.{_QKV[0]}", _QKV[:1], _PEFT, 6.0),
    ],
)
def test_each_layout_that_a_page_shows_is_read_at_its_strength(
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    page: str,
    variant: str,
    key: str,
    layers: tuple[str, ...],
    matrices: tuple[str, str],
    alpha: float | None,
) -> None:
    assert key.split(".", 1)[0] in (DOCS / f"migrate_{page}.md").read_text()
    family = get_family(variant.split("-")[0])
    checkpoint = family.open(ModelConfig(family=family.name, path=str(tiny_checkpoints[variant])))
    model = checkpoint.denoiser.load_transformer(torch.float32)
    torch.manual_seed(0)
    sides = [model.get_submodule(name).weight.shape for name in layers]
    down, up = torch.randn(3, sides[0][1]), torch.randn(sum(side[0] for side in sides), 3)
    tensors = {f"{key}.{matrices[0]}.weight": down, f"{key}.{matrices[1]}.weight": up}
    if alpha is not None:
        tensors[f"{key}.alpha"] = torch.tensor(alpha)
    save_file(tensors, tmp_path / "theirs.safetensors")
    read = read_lora(tmp_path / "theirs.safetensors", model, family.comfyui, checkpoint.info.pipeline_class).layers
    assert set(read) == set(layers)
    change = torch.cat([read[name].alpha / 3 * read[name].b @ read[name].a for name in layers])
    torch.testing.assert_close(change, (alpha or 3.0) / 3 * up @ down)
