"""How a person talks to a node that runs: a socket in its state folder, what it answers, and that in words.

Whoever may read the folder's key may talk to the node, and nobody else. It knows nothing of other nodes.
"""
