"""Base of the families whose checkpoints are for Diffusers' `ModularPipeline`: blocks in place of a pipeline's class.

Such a checkpoint has `modular_model_index.json` in place of `model_index.json`. A family gives the pipeline's class as
`pipeline_class` and its name in `pipeline_names`, as other families do; the roles that load it need no more than
`load_pretrained`. What differs is sampling, for which `ModularSampler` is the base.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from dit_lora.families.base import Sampler
from dit_lora.families.guider import accept_guidance_scale


@dataclass(frozen=True, kw_only=True)
class ModularSampler(Sampler):
    """Sampler that runs the blocks of a modular pipeline."""

    output_field = "images"
    guidance_batch_size = 1  # guiders call the transformer once for each condition
    workflow: ClassVar[str]
    """The workflow of the pipeline's blocks that samples run, such as `text2image`."""
    text_blocks: ClassVar[tuple[str, ...]]
    """Blocks of the workflow that compute a prompt's tensors. Samples of cached tensors leave them out."""

    def _load_pipeline(self, dtype: torch.dtype, transformer: nn.Module | None, text: bool, **init_kwargs: Any) -> Any:
        blocks = None
        if not text:
            blocks = self.info.pipeline_class().blocks.get_workflow(self.workflow)
            for name in self.text_blocks:
                blocks.sub_blocks.pop(name)
        pipeline = super()._load_pipeline(dtype, transformer, text, blocks=blocks, **init_kwargs)
        return accept_guidance_scale(pipeline)
