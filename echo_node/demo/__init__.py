"""A swarm that learns while you watch, on one machine: what is put together, what is shown, what is drawn."""
