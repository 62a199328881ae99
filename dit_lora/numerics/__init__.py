"""Numbers that stay finite and runs that can be repeated."""
