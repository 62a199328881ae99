"""The modules of the tiny AuraFlow that `python -m benchmarks.faults --model aura-flow` damages."""

from benchmarks.faults.targets import FaultTargets

FAULT_TARGETS = (
    FaultTargets(
        family="aura_flow",
        variant="aura-flow",
        data={"height": 64, "width": 64},
        samples="images",
        attention="joint_transformer_blocks.0.attn",
        ff="joint_transformer_blocks.0.ff",
        ff_out="joint_transformer_blocks.0.ff.out_projection",
        modulation="joint_transformer_blocks.0.norm1.linear",
        time_proj="time_step_embed",
        late=0.83,  # of 1; a sixth of the sampled noise levels lie above it
        upper=720,
    ),
)
