"""Delivery that loses nothing: what must arrive waits on disk until a receipt names it. What it says, others know."""
