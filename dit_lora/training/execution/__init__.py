"""Ways of fitting a step: recomputation, offload, compilation."""
