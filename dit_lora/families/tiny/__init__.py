"""Components that several tiny checkpoints share."""
