"""Generation and scoring: token ids in, token ids and log-probabilities out, at the weights of one head.

`base` is the one interface and `local` an engine in this process; `worker` puts one into a process of its own, with
`serving` on the other side. `batch` and `draws` are what all engines share; `decoder` is what `torch` and `llamacpp` do
each their own way. Nothing in this room knows a peer, a run, a reward or a text.
"""
