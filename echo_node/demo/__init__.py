"""A swarm that learns while you watch, in one program: what is put together, what is shown, what is drawn."""
