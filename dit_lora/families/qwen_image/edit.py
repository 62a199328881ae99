"""Qwen-Image-Edit (one image), and Qwen-Image-Edit-2509 and -2511 (one to three images).

The network is Qwen-Image's, with the references' latents after the noisy ones. Sizes, captions and latents come from
the stock pipelines' own code (diffusers/pipelines/qwenimage/pipeline_qwenimage_edit.py,
pipeline_qwenimage_edit_plus.py).
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
from dit_lora.families.base import Sampling, Tensors, TensorSpec, TextEncoder, TextLimit, VideoEncoder
from dit_lora.families.packed_latents import PACK_SIZE
from dit_lora.families.posterior import encode_video
from dit_lora.families.qwen_image.checkpoint import QwenImageCheckpoint, build_empty_pipeline
from dit_lora.families.qwen_image.picture_text import (
    MAX_RATIO,
    PictureTextEncoder,
    load_image_processor,
    load_processor,
    max_image_tokens,
)
from dit_lora.families.references import PictureEncoder, ReferenceSpec, get_reference_latents
from dit_lora.families.vae_memory import PLAIN_VAE, VaeMemory

_IMAGE_AREA = 1024 * 1024  # pipeline_qwenimage_edit.py, __call__
_IMAGE_TOKEN = "<|image_pad|>"


@dataclass(frozen=True, kw_only=True)
class QwenImageEditCheckpoint(QwenImageCheckpoint):
    """A Qwen-Image-Edit checkpoint."""

    pipeline_class: ClassVar[Any] = QwenImageEditPipeline
    # Qwen-Image-Edit takes exactly one image.
    max_references: ClassVar[int] = 1

    @property
    def references(self) -> ReferenceSpec:
        return ReferenceSpec(
            1,
            self.max_references,
            self._reference_shape,
            _reference_error,
            is_encoded_with_caption=True,
            is_resizable=False,
        )

    def _vae_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width at which the VAE encodes an image of this size."""
        scaled_width, scaled_height, _ = edit.calculate_dimensions(_IMAGE_AREA, width / height)
        return scaled_height, scaled_width

    def _text_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width at which the text encoder's processor gets an image of this size."""
        return self._vae_size(height, width)

    @property
    def _text_area(self) -> int:
        """Approximate number of pixels of an image for the text encoder."""
        return _IMAGE_AREA

    def _reference_shape(self, height: int, width: int, shape: VideoShape) -> VideoShape:
        return VideoShape(1, *self._vae_size(height, width))

    def _prompt_images(self, pictures: list[Image.Image]) -> Any:
        """Images in the form in which the pipeline encodes them with a prompt."""
        return pictures[0]

    def _max_prompt_tokens(self, image_processor: Any) -> int:
        """Number of tokens that captions are padded to: the pipeline's default for text, plus those of the images.

        `image_processor` is the image processor.
        """
        # An upper bound, so that one padded length fits every caption with its images.
        return self.text_tokens + self.max_references * max_image_tokens(image_processor, self._text_area)

    def _empty_caption_prompt(self, num_images: int) -> str:
        """The prompt of an empty caption, without the tokens of its images."""
        # The image's own tokens are counted by `_max_prompt_tokens`.
        template: str = build_empty_pipeline(self.pipeline_class).prompt_template_encode
        return template.format("").replace(_IMAGE_TOKEN, "")

    def load_text_limit(self) -> TextLimit:
        """Number of caption tokens next to the maximum number of images. The pipeline itself truncates nothing."""
        tokenizer = load_processor(self.path).tokenizer
        num_template_tokens = len(tokenizer(self._empty_caption_prompt(self.max_references)).input_ids)
        # The pipeline drops this many tokens at the start of the template from the embeddings.
        num_dropped = build_empty_pipeline(self.pipeline_class).prompt_template_encode_start_idx
        return TextLimit(tokenizer, self.text_tokens - (num_template_tokens - num_dropped))

    def text_cache_key(self) -> Mapping[str, Any]:
        pictures = load_image_processor(self.path)
        return {
            **super().text_cache_key(),
            "tokens": self._max_prompt_tokens(pictures),
            "processor": self.path / "processor",
            # Transformers has one for torchvision and one for Pillow, whose pixels differ.
            "pictures": type(pictures).__name__,
        }

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        size = (
            self._max_prompt_tokens(load_image_processor(self.path)),
            self.transformer_config["joint_attention_dim"],
        )
        return {"prompt_embeds": (torch.Size(size), dtype), "prompt_mask": (torch.Size(size[:1]), torch.bool)}

    def load_text_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
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
        """Load Qwen2.5-VL as the pipeline uses it, for captions with references.

        Captions are padded with zeros and have a mask of text and image tokens.
        """
        pipeline = self.load_text_pipeline(dtype, device)
        limit = self._max_prompt_tokens(pipeline.processor.image_processor)
        resize = pipeline.image_processor.resize

        def encode_caption(caption: str, references: list[Image.Image]) -> Tensors:
            # Scale as the pipeline does before it encodes the prompt.
            pictures = [resize(picture, *self._text_size(picture.height, picture.width)) for picture in references]
            embeddings, _ = pipeline.encode_prompt(caption, image=self._prompt_images(pictures), device=device)
            count = embeddings.shape[1]
            # A ClipError is about this sample only.
            if count > limit:
                raise ClipError(
                    f"its caption has {count} tokens with its pictures, and there is room for {limit}; the pipeline "
                    "cuts none: shorten it"
                )
            mask = torch.arange(limit, device=device) < count
            return {"prompt_embeds": functional.pad(embeddings, (0, 0, 0, limit - count)), "prompt_mask": mask[None]}

        return PictureTextEncoder(self.path.name, encode_caption)

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE in fp32. Samples keep the image's posterior and references' normalised mode, (C, 1, H, W)."""
        vae: Any = memory.load(AutoencoderKLQwenImage, self.path, torch.float32, device)
        pipeline: Any = SimpleNamespace(vae=vae, latent_channels=vae.config.z_dim)
        processor = VaeImageProcessor(vae_scale_factor=self.size_multiple)

        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            return encode_video(vae, pixels)

        def encode_reference(picture: Image.Image) -> torch.Tensor:
            # (1, 3, height, width) -> (1, 3, 1, height, width)
            values = processor.preprocess(picture, *self._vae_size(picture.height, picture.width))
            encoded = self.pipeline_class._encode_vae_image(pipeline, values.unsqueeze(2).to(device), generator=None)
            return encoded[0]

        return PictureEncoder(encode, encode_reference, None)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, P); equal to one call of the stock pipeline.

        References follow the noisy latents, clean. In 2511 they have timestep 0 (`zero_cond_t`), otherwise the same
        timestep.
        """
        references = get_reference_latents(batch)
        # (B, S, P), followed by the tokens of each reference.
        hidden = torch.cat([noisy, *(self.pack_latents(reference.float()) for reference in references)], dim=1)
        grids = [(reference.shape[-2] // PACK_SIZE, reference.shape[-1] // PACK_SIZE) for reference in references]
        prediction = self.run_transformer(transformer, hidden, timesteps, batch, [self.token_grid(batch), *grids])
        # Keep the output for the noisy tokens only.
        return prediction[:, : noisy.shape[1]]

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        processor = load_processor(self.path) if text else None
        return self._load_pipeline(dtype, transformer, text, processor=processor)

    def reference_kwargs(self, sampling: Sampling) -> dict[str, Any]:
        arguments = super().reference_kwargs(sampling)
        # Given a list, the pipeline would not scale the image for the text encoder.
        return {"image": self._prompt_images(arguments["image"])}


@dataclass(frozen=True, kw_only=True)
class QwenImageEditPlusCheckpoint(QwenImageEditCheckpoint):
    """A Qwen-Image-Edit-2509 or -2511 checkpoint, whose text encoder gets smaller images."""

    pipeline_class: ClassVar[Any] = QwenImageEditPlusPipeline
    max_references = 3  # the cards of 2509 and 2511: "1 to 3 input images"

    def _vae_size(self, height: int, width: int) -> tuple[int, int]:
        # calculate_dimensions returns (width, height).
        size = edit_plus.calculate_dimensions(edit_plus.VAE_IMAGE_SIZE, width / height)
        return size[1], size[0]

    def _text_size(self, height: int, width: int) -> tuple[int, int]:
        size = edit_plus.calculate_dimensions(self._text_area, width / height)
        return size[1], size[0]

    @property
    def _text_area(self) -> int:
        return edit_plus.CONDITION_IMAGE_SIZE

    def _prompt_images(self, pictures: list[Image.Image]) -> Any:
        return pictures

    def _empty_caption_prompt(self, num_images: int) -> str:
        # QwenImageEditPlusPipeline._get_qwen_prompt_embeds
        names = "".join(f"Picture {number}: <|vision_start|><|vision_end|>" for number in range(1, num_images + 1))
        template: str = build_empty_pipeline(self.pipeline_class).prompt_template_encode
        return template.format(names)


def _reference_error(height: int, width: int) -> str | None:
    if max(height, width) > MAX_RATIO * min(height, width):
        return f"it is {width} x {height}, and one side may be {MAX_RATIO} times the other"
    return None
