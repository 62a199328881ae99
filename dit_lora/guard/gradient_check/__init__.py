"""Compare the gradient of a step with the slope of its loss, and find the layers where they differ."""
