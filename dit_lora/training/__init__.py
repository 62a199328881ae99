"""The verbs: precompute, train, sample, and what they run on."""
