"""Recipes: their sections, how they are read, and the recipes that come with the package."""
