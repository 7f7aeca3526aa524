"""Model sources: a folder, a hub, or a GGUF file, also inside a package.

`model_source.find_model` returns a Hugging Face folder of safetensors for any of them, and
`open_model` the same in the form that runs keep. Importing this package imports neither torch nor
the hub's library.
"""
