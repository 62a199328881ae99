"""Charts and heat maps for pages."""
