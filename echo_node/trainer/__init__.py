"""The trainer role: turns groups of completions into the next weights."""
