"""LTX-2, LTX-2.3 and LTX-2.5."""

from functools import partial
from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import Call, Case, Smoke, clips_with_sound, edit_clips, edit_clips_with_sound

NATIVE = VideoShape(17, 64, 96)


def unpacked(pipeline: Any, tokens: torch.Tensor, shape: VideoShape = NATIVE) -> torch.Tensor:
    """Latents (B, C, F, H, W) as the VAE decodes them; LTX2Pipeline.__call__ ends so."""
    grid = ((shape.frames - 1) // 8 + 1, shape.height // 32, shape.width // 32)
    return denormalised(pipeline, pipeline._unpack_latents(tokens, *grid))


def denormalised(pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
    vae = pipeline.vae
    return pipeline._denormalize_latents(latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)


def decode(pipeline: Any, clean: torch.Tensor, shape: VideoShape = NATIVE) -> torch.Tensor:
    return pipeline.vae.decode(unpacked(pipeline, clean, shape), None, return_dict=False)[0]


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    """The cache holds what is normalised by the VAE's own statistics."""
    mean_of, std = (
        statistic.view(1, -1, 1, 1, 1) for statistic in (pipeline.vae.latents_mean, pipeline.vae.latents_std)
    )
    return pipeline.vae.decode(mean * std + mean_of).sample


def decode_rest(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Without the first frame, which is the picture's: compressed as the pipeline does, it is not the clip's."""
    return pipeline.vae.decode(unpacked(pipeline, clean)[:, :, 1:], None, return_dict=False)[0]


def vae_decode_rest(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    return vae_decode(pipeline, mean[:, :, 1:])


def alone(call: Call) -> bool:
    """True of the calls for modality guidance, in which video does not attend to sound: a training step is one."""
    return call["isolate_modalities"]


def of_the_sample(call: Call) -> torch.Tensor:
    """The one timestep of a sample, which image-to-video tells every token; 0 at those of the image."""
    return call["sigma"]


def of_the_video(call: Call) -> torch.Tensor:
    """The tokens in front of the reference's."""
    tokens: torch.Tensor = call["hidden_states"]
    return tokens[:, : call["num_frames"] * call["height"] * call["width"]]


SIDES = (
    (VideoShape(9, 48, 96), "height must be a multiple of 32; got 48, nearest 32 and 64"),
    (VideoShape(9, 64, 7), "width must be a multiple of 32; got 7, nearest 32"),
    (VideoShape(8, 64, 96), r"frames must be 8n \+ 1; got 8, nearest 1 and 9"),
    (VideoShape(23, 64, 96), r"frames must be 8n \+ 1; got 23, nearest 17 and 25"),
)
HALVED = VideoShape(17, 64, 128)
HALVES = ((VideoShape(9, 64, 96), "references 2 times smaller than 96 x 64, .* be multiples of 64"),)
ONE = ((VideoShape(1, 64, 96), "frames must be 9 or more, as the first is given; got 1"),)


def case(variant: str, **other: Any) -> Case:
    common: dict[str, Any] = {
        "family": "ltx2",
        "variant": variant,
        "native": NATIVE,
        "off_native": VideoShape(9, 96, 64),
        "captions": ("clip 0", "clip 1, with  two spaces", "a far longer one, " * 70),
        "decode": decode,
        "vae_decode": vae_decode,
        "guidance": 2.0,
        "compared": alone,
        "takes": frozenset({"lora_linear", "ada_norm", "qk_norm_rope"}),
        "refused": SIDES,
    }
    return Case(**{**common, **other})


CASES = (
    case("ltx-2", thorough=True),
    case("ltx-2.3", call_dtype=torch.bfloat16),
    case("ltx-2.5", has_other_modules=True),
    case(
        "ltx-2.5",
        model={"task": "i2v"},
        pictures=("image",),
        decode=decode_rest,
        vae_decode=vae_decode_rest,
        timesteps=of_the_sample,
        refused=(*SIDES, *ONE),
        thorough=True,
    ),
    case(
        "ltx-2.3",
        model={"task": "i2v"},
        pictures=("image",),
        decode=decode_rest,
        vae_decode=vae_decode_rest,
        timesteps=of_the_sample,
        refused=(*SIDES, *ONE),
    ),
    case(
        "ltx-2.3",
        model={"task": "ic_lora"},
        native=HALVED,
        off_native=VideoShape(9, 128, 64),
        references=(VideoShape(17, 80, 120),),
        reference_resolution=48,
        decode=partial(decode, shape=HALVED),
        noisy=of_the_video,
        timesteps=of_the_sample,
        refused=(*SIDES, *HALVES),
    ),
)
SMOKES = {
    "ltx2": Smoke("ltx-2.3"),
    "ltx2_2.5": Smoke("ltx-2.5"),
    "ltx2_sound": Smoke("ltx-2.3", clips_with_sound),
    "ltx2_i2v": Smoke("ltx-2", overrides=("data.image_dropout=0.5",), pictures=("images",)),
    "ltx2_i2v_sound": Smoke("ltx-2", clips_with_sound, overrides=("data.image_dropout=0.5",), pictures=("images",)),
    "ltx2_ic_lora": Smoke("ltx-2.3", edit_clips, references=9),
}
OTHERS = {
    "ltx2_first": SMOKES["ltx2"].change("ltx2", "ltx-2"),
    "ltx2_first_sound": SMOKES["ltx2_sound"].change("ltx2_sound", "ltx-2"),
    "ltx2_i2v_sound": SMOKES["ltx2_i2v"].change("ltx2_i2v", "ltx-2.3", "data.sound=true", write_data=clips_with_sound),
    "ltx2_ic_lora_sound": SMOKES["ltx2_ic_lora"].change(
        "ltx2_ic_lora", "ltx-2", "data.sound=true", write_data=edit_clips_with_sound
    ),
}
