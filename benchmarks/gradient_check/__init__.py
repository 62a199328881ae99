"""Planted faults that leave every value finite, and the gradient check that must find them."""
