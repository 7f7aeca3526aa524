"""Generation and scoring of token ids at the weights of one head.

`base` is the interface, `local` an engine in this process, `worker` an engine in a process of its
own. `continuous_batching` and `token_sampling` are shared by all engines; `torch_decoder` and
`llama_decoder` implement `decoder`.
"""
