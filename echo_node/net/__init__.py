"""What goes between nodes, as bytes: gossip, requests, provider records, peers and their faults.

`base` is the one interface that the rest of the program uses; each medium implements it in a file of its own.
Nothing here knows what the bytes mean, nor any engine, run or role: meaning comes in as validators and handlers.
"""
