"""Qwen-Image-Edit, of one picture, and Qwen-Image-Edit-2509 and -2511, of one to three.

The network is Qwen-Image's, with the references' latents behind the noisy ones. Sizes, captions and latents are the stock
pipelines' own code, called here (diffusers/pipelines/qwenimage/pipeline_qwenimage_edit.py, pipeline_qwenimage_edit_plus.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from PIL import Image
from torch import nn
from torch.nn import functional

from dit_lora.config.data import VideoShape
from dit_lora.data.media.video import ClipError
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.families.base import (
    Sampling,
    Tensors,
    TensorSpec,
    TextEncoder,
    TextLimit,
    VideoEncoder,
)
from dit_lora.families.posterior import encode_video
from dit_lora.families.qwen_image.checkpoint import QwenImageCheckpoint, bare
from dit_lora.families.qwen_image.picture_text import (
    MOST_RATIO,
    PictureText,
    load_pictures,
    load_processor,
    most_tokens,
)
from dit_lora.families.qwen_latents import PACKED
from dit_lora.families.references import PictureEncoder, References, latents_of
from dit_lora.families.vae_memory import PLAIN_VAE, VaeMemory

_AREA = 1024 * 1024  # pipeline_qwenimage_edit.py, __call__
_IMAGE = "<|image_pad|>"


@dataclass(frozen=True, kw_only=True)
class QwenImageEditCheckpoint(QwenImageCheckpoint):
    """One Qwen-Image-Edit checkpoint."""

    pipeline_class: ClassVar[Any] = QwenImageEditPipeline
    most_references: ClassVar[int] = 1

    @property
    def references(self) -> References:
        return References(
            1,
            self.most_references,
            self._reference_shape,
            _wrong_reference,
            in_text=True,
            scales=False,
        )

    def _vae_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width that the VAE is given of a picture of this size."""
        scaled_width, scaled_height, _ = edit.calculate_dimensions(_AREA, width / height)
        return scaled_height, scaled_width

    def _text_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width that the text encoder's processor is given."""
        return self._vae_size(height, width)

    @property
    def _text_area(self) -> int:
        """Number of pixels that these are about."""
        return _AREA

    def _reference_shape(self, height: int, width: int, shape: VideoShape) -> VideoShape:
        return VideoShape(1, *self._vae_size(height, width))

    def _shown(self, pictures: list[Image.Image]) -> Any:
        """Return pictures as the pipeline has them where it encodes a prompt."""
        return pictures[0]

    def _room(self, pictures: Any) -> int:
        """Return the tokens that captions are padded to: the default of the pipeline's call for text, and the pictures' own.

        `pictures` prepares them.
        """
        return self.text_tokens + self.most_references * most_tokens(pictures, self._text_area)

    def _around(self, pictures: int) -> str:
        """Return the prompt of an empty caption without the tokens of its pictures."""
        own: str = bare(self.pipeline_class).prompt_template_encode
        return own.format("").replace(_IMAGE, "")

    def text_limit(self) -> TextLimit:
        """Return the room that is left a caption beside as many pictures as there may be; the pipeline itself cuts none."""
        tokenizer = load_processor(self.path).tokenizer
        around = len(tokenizer(self._around(self.most_references)).input_ids)
        dropped = bare(self.pipeline_class).prompt_template_encode_start_idx
        return TextLimit(tokenizer, self.text_tokens - (around - dropped))

    def text_facts(self) -> Mapping[str, Any]:
        pictures = load_pictures(self.path)
        return {
            **super().text_facts(),
            "tokens": self._room(pictures),
            "processor": self.path / "processor",
            # Transformers has one of torchvision and one of Pillow, whose pixels differ.
            "pictures": type(pictures).__name__,
        }

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        size = (
            self._room(load_pictures(self.path)),
            self.transformer_config["joint_attention_dim"],
        )
        return {
            "prompt_embeds": (torch.Size(size), dtype),
            "prompt_mask": (torch.Size(size[:1]), torch.bool),
        }

    def text_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        return load_pretrained(
            self.pipeline_class,
            self.path,
            transformer=None,
            vae=None,
            processor=load_processor(self.path),
            dtype=dtype,
            use_safetensors=True,
        ).to(device)

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Qwen2.5-VL as the pipeline uses it, with the references, zeros behind, and a mask of what is text or picture."""
        pipeline = self.text_pipeline(dtype, device)
        room = self._room(pipeline.processor.image_processor)
        resize = pipeline.image_processor.resize

        def encode_one(caption: str, given: list[Image.Image]) -> Tensors:
            pictures = [resize(one, *self._text_size(one.height, one.width)) for one in given]
            embeddings, _ = pipeline.encode_prompt(
                caption, image=self._shown(pictures), device=device
            )
            count = embeddings.shape[1]
            if count > room:
                raise ClipError(
                    f"its caption has {count} tokens with its pictures, and there is room for {room}; the pipeline cuts "
                    "none: shorten it"
                )
            mask = torch.arange(room, device=device) < count
            return {
                "prompt_embeds": functional.pad(embeddings, (0, 0, 0, room - count)),
                "prompt_mask": mask[None],
            }

        return PictureText(self.path.name, encode_one)

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Keeps the posterior of the picture, and of its references the normalised mode, (C, 1, H, W); in fp32."""
        vae: Any = memory.load(AutoencoderKLQwenImage, self.path, torch.float32, device)
        pipeline: Any = SimpleNamespace(vae=vae, latent_channels=vae.config.z_dim)
        processor = VaeImageProcessor(vae_scale_factor=self.side_step)

        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            return encode_video(vae, pixels)

        def encode_reference(picture: Image.Image) -> torch.Tensor:
            values = processor.preprocess(picture, *self._vae_size(picture.height, picture.width))
            found = self.pipeline_class._encode_vae_image(
                pipeline, values.unsqueeze(2).to(device), generator=None
            )
            latents: torch.Tensor = found[0]
            return latents

        return PictureEncoder(encode, encode_reference, None)

    def predict(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the velocity of packed latents (B, S, P); one call equals one of the stock pipeline's.

        References stand behind the noisy latents, clean; of 2511 they are at timestep 0 (`zero_cond_t`), else at the same.
        """
        references = latents_of(batch)
        hidden = torch.cat([noisy, *(self.packed(one.float()) for one in references)], dim=1)
        grids = [(one.shape[-2] // PACKED, one.shape[-1] // PACKED) for one in references]
        found = self.call(transformer, hidden, timesteps, batch, [self.grid(batch), *grids])
        return found[:, : noisy.shape[1]]

    def pipeline(
        self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True
    ) -> Any:
        processor = load_processor(self.path) if text else None
        return self._load_pipeline(dtype, transformer, text, processor=processor)

    def reference_arguments(self, how: Sampling) -> dict[str, Any]:
        given = super().reference_arguments(how)
        # Of a list, the pipeline would leave what it shows the text encoder unscaled.
        return {"image": self._shown(given["image"])}


@dataclass(frozen=True, kw_only=True)
class QwenImageEditPlusCheckpoint(QwenImageEditCheckpoint):
    """One Qwen-Image-Edit-2509 or -2511 checkpoint, whose text encoder sees smaller pictures."""

    pipeline_class: ClassVar[Any] = QwenImageEditPlusPipeline
    most_references = 3  # the cards of 2509 and 2511: "1 to 3 input images"

    def _vae_size(self, height: int, width: int) -> tuple[int, int]:
        size = edit_plus.calculate_dimensions(edit_plus.VAE_IMAGE_SIZE, width / height)
        return size[1], size[0]

    def _text_size(self, height: int, width: int) -> tuple[int, int]:
        size = edit_plus.calculate_dimensions(self._text_area, width / height)
        return size[1], size[0]

    @property
    def _text_area(self) -> int:
        return edit_plus.CONDITION_IMAGE_SIZE

    def _shown(self, pictures: list[Image.Image]) -> Any:
        return pictures

    def _around(self, pictures: int) -> str:
        # QwenImageEditPlusPipeline._get_qwen_prompt_embeds
        names = "".join(
            f"Picture {number}: <|vision_start|><|vision_end|>" for number in range(1, pictures + 1)
        )
        own: str = bare(self.pipeline_class).prompt_template_encode
        return own.format(names)


def _wrong_reference(height: int, width: int) -> str | None:
    if max(height, width) > MOST_RATIO * min(height, width):
        return f"it is {width} x {height}, and one side may be {MOST_RATIO} times the other"
    return None
