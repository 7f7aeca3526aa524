"""How peers meet: seeds, the book of good peers, the LAN, and what other peers tell. It knows nothing of what they
meet for.
"""
