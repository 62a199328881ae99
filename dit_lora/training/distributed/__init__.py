"""Ways of spreading a step over ranks, one engine each."""
