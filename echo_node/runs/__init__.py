"""A run: its spec, sealed manifest, tokenizer, download and evaluation."""
