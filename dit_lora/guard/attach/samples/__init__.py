"""Find which dataset item a row of a model's input is, where that can be proven."""
