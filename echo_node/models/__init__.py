"""Where a model comes from: a folder, a hub, or a GGUF file, which may lie inside an installed package.

`finding` is the one door: it gives a Hugging Face folder of safetensors, whatever the person wrote. This room knows no
engine, no run and no peer, and importing it imports neither torch nor the hub's library.
"""
