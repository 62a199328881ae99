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
    """A Qwen-Image-Edit checkpoint."""

    pipeline_class: ClassVar[Any] = QwenImageEditPipeline
    # Qwen-Image-Edit takes exactly one image.
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
        """Height and width at which the VAE encodes an image of this size."""
        scaled_width, scaled_height, _ = edit.calculate_dimensions(_AREA, width / height)
        return scaled_height, scaled_width

    def _text_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width at which the text encoder's processor gets an image of this size."""
        return self._vae_size(height, width)

    @property
    def _text_area(self) -> int:
        """Approximate number of pixels of an image for the text encoder."""
        return _AREA

    def _reference_shape(self, height: int, width: int, shape: VideoShape) -> VideoShape:
        return VideoShape(1, *self._vae_size(height, width))

    def _shown(self, pictures: list[Image.Image]) -> Any:
        """Images in the form in which the pipeline encodes them with a prompt."""
        return pictures[0]

    def _room(self, pictures: Any) -> int:
        """Number of tokens that captions are padded to: the pipeline's default for text, plus those of the images.

        `pictures` is the image processor.
        """
        # An upper bound, so that one padded length fits every caption with its images.
        return self.text_tokens + self.most_references * most_tokens(pictures, self._text_area)

    def _around(self, pictures: int) -> str:
        """The prompt of an empty caption, without the tokens of its images."""
        # The image's own tokens are counted by `_room`.
        template: str = bare(self.pipeline_class).prompt_template_encode
        return template.format("").replace(_IMAGE, "")

    def text_limit(self) -> TextLimit:
        """Number of caption tokens next to the maximum number of images. The pipeline itself truncates nothing."""
        tokenizer = load_processor(self.path).tokenizer
        num_template_tokens = len(tokenizer(self._around(self.most_references)).input_ids)
        # The pipeline drops this many tokens at the start of the template from the embeddings.
        num_dropped = bare(self.pipeline_class).prompt_template_encode_start_idx
        return TextLimit(tokenizer, self.text_tokens - (num_template_tokens - num_dropped))

    def text_facts(self) -> Mapping[str, Any]:
        pictures = load_pictures(self.path)
        return {
            **super().text_facts(),
            "tokens": self._room(pictures),
            "processor": self.path / "processor",
            # Transformers has one for torchvision and one for Pillow, whose pixels differ.
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
        """Load Qwen2.5-VL as the pipeline uses it, for captions with references.

        Captions are padded with zeros and have a mask of text and image tokens.
        """
        pipeline = self.text_pipeline(dtype, device)
        limit = self._room(pipeline.processor.image_processor)
        resize = pipeline.image_processor.resize

        def encode_one(caption: str, given: list[Image.Image]) -> Tensors:
            # Scale as the pipeline does before it encodes the prompt.
            pictures = [
                resize(picture, *self._text_size(picture.height, picture.width))
                for picture in given
            ]
            embeddings, _ = pipeline.encode_prompt(
                caption, image=self._shown(pictures), device=device
            )
            count = embeddings.shape[1]
            # A ClipError is about this sample only.
            if count > limit:
                raise ClipError(
                    f"its caption has {count} tokens with its pictures, and there is room for {limit}; the pipeline "
                    "cuts none: shorten it"
                )
            mask = torch.arange(limit, device=device) < count
            return {
                "prompt_embeds": functional.pad(embeddings, (0, 0, 0, limit - count)),
                "prompt_mask": mask[None],
            }

        return PictureText(self.path.name, encode_one)

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE in fp32. Samples keep the image's posterior and references' normalised mode, (C, 1, H, W)."""
        vae: Any = memory.load(AutoencoderKLQwenImage, self.path, torch.float32, device)
        pipeline: Any = SimpleNamespace(vae=vae, latent_channels=vae.config.z_dim)
        processor = VaeImageProcessor(vae_scale_factor=self.side_step)

        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            return encode_video(vae, pixels)

        def encode_reference(picture: Image.Image) -> torch.Tensor:
            # (1, 3, height, width) -> (1, 3, 1, height, width)
            values = processor.preprocess(picture, *self._vae_size(picture.height, picture.width))
            encoded = self.pipeline_class._encode_vae_image(
                pipeline, values.unsqueeze(2).to(device), generator=None
            )
            latents: torch.Tensor = encoded[0]
            return latents

        return PictureEncoder(encode, encode_reference, None)

    def predict(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, P); equal to one call of the stock pipeline.

        References follow the noisy latents, clean. In 2511 they have timestep 0 (`zero_cond_t`), otherwise the same
        timestep.
        """
        references = latents_of(batch)
        # (B, S, P), followed by the tokens of each reference.
        hidden = torch.cat(
            [noisy, *(self.packed(reference.float()) for reference in references)], dim=1
        )
        grids = [
            (reference.shape[-2] // PACKED, reference.shape[-1] // PACKED)
            for reference in references
        ]
        prediction = self.call(transformer, hidden, timesteps, batch, [self.grid(batch), *grids])
        # Keep the output for the noisy tokens only.
        return prediction[:, : noisy.shape[1]]

    def pipeline(
        self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True
    ) -> Any:
        processor = load_processor(self.path) if text else None
        return self._load_pipeline(dtype, transformer, text, processor=processor)

    def reference_arguments(self, how: Sampling) -> dict[str, Any]:
        arguments = super().reference_arguments(how)
        # Given a list, the pipeline would not scale the image for the text encoder.
        return {"image": self._shown(arguments["image"])}


@dataclass(frozen=True, kw_only=True)
class QwenImageEditPlusCheckpoint(QwenImageEditCheckpoint):
    """A Qwen-Image-Edit-2509 or -2511 checkpoint, whose text encoder gets smaller images."""

    pipeline_class: ClassVar[Any] = QwenImageEditPlusPipeline
    most_references = 3  # the cards of 2509 and 2511: "1 to 3 input images"

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

    def _shown(self, pictures: list[Image.Image]) -> Any:
        return pictures

    def _around(self, pictures: int) -> str:
        # QwenImageEditPlusPipeline._get_qwen_prompt_embeds
        names = "".join(
            f"Picture {number}: <|vision_start|><|vision_end|>" for number in range(1, pictures + 1)
        )
        template: str = bare(self.pipeline_class).prompt_template_encode
        return template.format(names)


def _wrong_reference(height: int, width: int) -> str | None:
    if max(height, width) > MOST_RATIO * min(height, width):
        return f"it is {width} x {height}, and one side may be {MOST_RATIO} times the other"
    return None
