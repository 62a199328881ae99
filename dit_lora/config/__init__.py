"""The recipe: its sections, how it is read, and the recipes of the wheel."""
