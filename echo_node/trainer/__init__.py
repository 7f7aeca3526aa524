"""The training role: turns groups of completions into the next version of the weights."""
