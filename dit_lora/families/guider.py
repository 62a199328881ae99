"""Guidance of pipelines that have a guider, a component, in place of the argument `guidance_scale`."""

from typing import Any


def accept_guidance_scale(pipeline: Any) -> Any:
    """Let a pipeline with a guider take `guidance_scale` when it is called, as other pipelines do, in place.

    A scale of 1 or less turns guidance off.
    """
    base = type(pipeline)

    def call(self: Any, *args: Any, guidance_scale: float, **kwargs: Any) -> Any:
        # At exactly 1 a guider predicts without the negative prompt.
        scale = max(guidance_scale, 1.0)
        if hasattr(self, "update_components"):
            guider = self.get_component_spec("guider").create(guidance_scale=scale)
            self.update_components(guider=guider)
        else:
            self.guider = self.guider.new(guidance_scale=scale)
        return base.__call__(self, *args, **kwargs)

    # Files and messages name the class, so the new class keeps its name.
    members = {"__call__": call, "__module__": base.__module__, "__doc__": base.__doc__}
    pipeline.__class__ = type(base.__name__, (base,), members)
    return pipeline
