"""The guard: gate, replay, probe, diagnosis, policy, snapshots, monitor, parity and bundles."""
