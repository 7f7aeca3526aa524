"""The sampler: slots in, sealed groups out. It never imports the trainer or the verifier."""
