"""Generation and scoring: token ids in, token ids and log-probabilities out, at the weights of one head.

`base` is the one interface; `checks`, `draws` and `branches` are what all engines share: refusing bad input, the
arithmetic of drawing, and which completions still agree; `torch` runs transformers models. Nothing in this room knows a peer, a run, a reward or a text.
"""
