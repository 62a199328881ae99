"""Record the model calls of a loop so that they can be run again."""
