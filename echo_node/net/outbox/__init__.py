"""Durable at-least-once delivery: items wait on disk until a receipt names them."""
