"""The section `train.timesteps` of a recipe: the noise levels of training."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dit_lora.config.section import Positive, Section

Density = Literal["uniform", "logit_normal", "stretched_logit_normal", "mode"]

# The densities that each parameter belongs to.
_PARAMETER_DENSITIES = {"mean": ("logit_normal", "stretched_logit_normal"), "mode_scale": ("mode",)}
_PARAMETER_DENSITIES["std"] = _PARAMETER_DENSITIES["mean"]


class TimestepsConfig(Section):
    """Options for sampling noise levels from 0 (clean) to 1 (noise).

    They are drawn from a density, shifted towards noise, then cut to a range. Options that are not set take the model
    family's defaults, which its recipes state with their source.
    """

    density: Density | None = None
    """Density before the shift. `logit_normal` and `mode`: arXiv 2403.03206, section 3.1. `stretched_logit_normal`:
    the shifted logit-normal stretched until its percentiles 0.5 and 99.9 are 0 and 1, a tenth of it uniform, with
    which LTX-2 is trained."""
    mean: float | None = None
    """Mean of the logit-normal densities; 0 where it is left out."""
    std: Positive | None = None
    """Standard deviation of the logit-normal densities; 1 where it is left out."""
    mode_scale: Annotated[float, Field(ge=-1, le=1.75)] | None = None
    """Weight of the middle in `mode`; 1.29 where it is left out, as in Diffusers' scripts. 0 is uniform."""
    shift: Positive | Literal["tokens"] | None = None
    """`t' = shift t / (1 + (shift - 1) t)`: above 1 towards noise, 1 for none. `tokens`: e^mu, where mu
    depends on the number of a sample's tokens, by each family's line in docs/models.md."""
    t_min: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Smallest noise level; the shifted density is cut to levels from `t_min` to below `t_max` and keeps its shape."""
    t_max: Annotated[float, Field(gt=0, le=1)] | None = None
    """Noise level that every draw is below."""

    @model_validator(mode="after")
    def _check_distribution_parameters(self) -> "TimestepsConfig":
        # A parameter that its density ignores is a mistake, so it is refused.
        for name, densities in _PARAMETER_DENSITIES.items():
            if getattr(self, name) is not None and (self.density or "logit_normal") not in densities:
                raise ValueError(f"{name} is of density {' or '.join(densities)}; got {self.density}")
        # An end that is left out is the full range's.
        low, high = self.t_min or 0.0, 1.0 if self.t_max is None else self.t_max
        if low >= high:
            raise ValueError(f"t_min={low:g} must be below t_max={high:g}")
        return self
