"""Qwen-Image-Edit (one image), and Qwen-Image-Edit-2509 and -2511 (one to three images).

The network is Qwen-Image's, with the references' latents after the noisy ones. Sizes, captions and latents come from
the stock pipelines' own code (diffusers/pipelines/qwenimage/pipeline_qwenimage_edit.py,
pipeline_qwenimage_edit_plus.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from PIL import Image
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.data.media.video import ClipError
from dit_lora.families.base import Sampling, TensorMap, Tensors, TensorSpec, TextEncoder, TextLimit, VideoEncoder
from dit_lora.families.captions import get_caption_spec
from dit_lora.families.conditioning import Conditioning
from dit_lora.families.latents import PLAIN_VAE, VaeMemory, append_references, compute_token_grid
from dit_lora.families.opening import build_empty_pipeline
from dit_lora.families.qwen_image.checkpoint import QwenImageSampler, get_template_cache_key, pack_latents, pad_caption
from dit_lora.families.qwen_image.picture_text import (
    MAX_RATIO,
    PictureTextEncoder,
    load_image_processor,
    load_processor,
    max_image_tokens,
)
from dit_lora.families.qwen_latents import QwenLatentsEncoders, QwenLatentsInfo
from dit_lora.families.references import PictureEncoder, ReferenceSpec, get_reference_latents

# pipeline_qwenimage_edit.py has the same value in `__call__`.
_IMAGE_AREA = edit_plus.VAE_IMAGE_SIZE
_IMAGE_TOKEN = "<|image_pad|>"


@dataclass(frozen=True, kw_only=True)
class QwenImageEditInfo(QwenLatentsInfo):
    """Info of a Qwen-Image-Edit checkpoint. The defaults are those of the first one, which takes one image."""

    pipeline_class: Any = QwenImageEditPipeline
    max_references: int = 1
    text_area: int = _IMAGE_AREA
    """Approximate number of pixels of an image for the text encoder. The VAE's is 1024x1024 in all versions."""
    image_prompt: str = ""
    """The text of each image that comes before the caption, formatted with the image's number."""

    @property
    def reference_spec(self) -> ReferenceSpec:
        return ReferenceSpec(
            1,
            self.max_references,
            lambda height, width, shape: VideoShape(1, *_compute_size(_IMAGE_AREA, height, width)),
            _reference_error,
            is_encoded_with_caption=True,
            is_resizable=False,
        )

    def select_prompt_images(self, pictures: list[Image.Image]) -> Any:
        """Reference images in the form in which Qwen-Image-Edit's pipeline encodes them with a prompt."""
        return pictures[0] if self.max_references == 1 else pictures


# Qwen-Image-Edit-2509 and -2511, whose text encoder gets smaller images.
EDIT_PLUS: dict[str, Any] = {
    "pipeline_class": QwenImageEditPlusPipeline,
    "max_references": 3,  # the cards of 2509 and 2511: "1 to 3 input images"
    "text_area": edit_plus.CONDITION_IMAGE_SIZE,
    # QwenImageEditPlusPipeline._get_qwen_prompt_embeds
    "image_prompt": f"Picture {{}}: <|vision_start|>{_IMAGE_TOKEN}<|vision_end|>",
}


@dataclass(frozen=True, kw_only=True)
class ReferenceConditioning(Conditioning):
    """Conditioning on references whose tokens follow the noisy ones, clean.

    In 2511 they have timestep 0 (`zero_cond_t`), otherwise the same timestep.
    """

    def append_conditioning_tokens(self, transformer_kwargs: dict[str, Any], batch: TensorMap) -> dict[str, Any]:
        # (frames, rows, columns) of each reference: the transformer derives positions from them.
        shapes = [(1, *compute_token_grid(latents)) for latents in get_reference_latents(batch)]
        return transformer_kwargs | {
            "hidden_states": append_references(transformer_kwargs["hidden_states"], batch, pack_latents),
            "img_shapes": [[*sample_shapes, *shapes] for sample_shapes in transformer_kwargs["img_shapes"]],
        }


@dataclass(frozen=True, kw_only=True)
class QwenImageEditEncoders(QwenLatentsEncoders):
    info: QwenImageEditInfo

    def load_text_limit(self) -> TextLimit:
        """Number of caption tokens that fit next to the maximum number of images.

        The pipeline itself truncates nothing.
        """
        tokenizer, stock = load_processor(self.info.path).tokenizer, build_empty_pipeline(self.info.pipeline_class)
        image_prompts = (self.info.image_prompt.format(number + 1) for number in range(self.info.max_references))
        # Without the images' own tokens, which `_count_prompt_tokens` adds.
        template = stock.prompt_template_encode.format("".join(image_prompts)).replace(_IMAGE_TOKEN, "")
        # The pipeline drops some tokens at the start of the template from the embeddings.
        num_kept = len(tokenizer(template).input_ids) - stock.prompt_template_encode_start_idx
        return TextLimit(tokenizer, self.info.text_tokens - num_kept)

    def _count_prompt_tokens(self, image_processor: Any) -> int:
        """Number of tokens that Qwen-Image-Edit's captions are padded to.

        It is the pipeline's default for text, plus those of the images.
        """
        # An upper bound, so that one padded length fits every caption with its images.
        num_image_tokens = max_image_tokens(image_processor, self.info.text_area)
        return self.info.text_tokens + self.info.max_references * num_image_tokens

    def text_cache_key(self) -> Mapping[str, Any]:
        pictures = load_image_processor(self.info.path)
        return {
            **super().text_cache_key(),
            "tokens": self._count_prompt_tokens(pictures),
            **get_template_cache_key(self.info.pipeline_class),
            "processor": self.info.path / "processor",
            # Transformers has one for torchvision and one for Pillow, whose pixels differ.
            "pictures": type(pictures).__name__,
        }

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        num_tokens = self._count_prompt_tokens(load_image_processor(self.info.path))
        return get_caption_spec(num_tokens, self.info.transformer_config["joint_attention_dim"], dtype, "prompt_mask")

    def load_text_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        return self._load_text_pipeline(dtype, device, processor=load_processor(self.info.path))

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Qwen2.5-VL as Qwen-Image-Edit's pipeline uses it, for captions with references.

        Captions are padded with zeros and have a mask of text and image tokens.
        """
        pipeline = self.load_text_pipeline(dtype, device)
        limit = self._count_prompt_tokens(pipeline.processor.image_processor)
        resize, area = pipeline.image_processor.resize, self.info.text_area

        def encode_caption(caption: str, references: list[Image.Image]) -> Tensors:
            # Scale as the pipeline does before it encodes the prompt.
            pictures = [resize(picture, *_compute_size(area, picture.height, picture.width)) for picture in references]
            images = self.info.select_prompt_images(pictures)
            embeddings, _ = pipeline.encode_prompt(caption, image=images, device=device)
            count = embeddings.shape[1]
            # A ClipError is about this sample only.
            if count > limit:
                raise ClipError(
                    f"its caption has {count} tokens with its pictures, and there is room for {limit}; the pipeline "
                    "cuts none: shorten it"
                )
            return pad_caption(embeddings, limit)

        return PictureTextEncoder(self.info.path.name, encode_caption)

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE in fp32. Samples keep the image's posterior and references' normalised mode, (C, 1, H, W)."""
        vae = self.load_vae(dtype, device, memory)
        pipeline: Any = SimpleNamespace(vae=vae, latent_channels=vae.config.z_dim)
        processor = VaeImageProcessor(vae_scale_factor=self.info.size_multiple)

        def encode_reference(picture: Image.Image) -> torch.Tensor:
            # (1, 3, height, width) -> (1, 3, 1, height, width)
            values = processor.preprocess(picture, *_compute_size(_IMAGE_AREA, picture.height, picture.width))
            values = values.unsqueeze(2).to(device)
            return self.info.pipeline_class._encode_vae_image(pipeline, values, generator=None)[0]

        return PictureEncoder(partial(self.encode_pixels, vae), encode_reference, None)


@dataclass(frozen=True, kw_only=True)
class QwenImageEditSampler(QwenImageSampler):
    info: QwenImageEditInfo

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        processor = load_processor(self.info.path) if text else None
        return self._load_pipeline(dtype, transformer, text, processor=processor)

    def reference_kwargs(self, sampling: Sampling) -> dict[str, Any]:
        arguments = super().reference_kwargs(sampling)
        # Given a list, the pipeline would not scale the image for the text encoder.
        return {"image": self.info.select_prompt_images(arguments["image"])}


def _compute_size(area: int, height: int, width: int) -> tuple[int, int]:
    """Height and width of a reference image, scaled to about `area` pixels as in Qwen-Image-Edit's pipelines."""
    scaled_width, scaled_height = edit_plus.calculate_dimensions(area, width / height)
    return scaled_height, scaled_width


def _reference_error(height: int, width: int) -> str | None:
    if max(height, width) > MAX_RATIO * min(height, width):
        return f"it is {width} x {height}, and one side may be {MAX_RATIO} times the other"
    return None
