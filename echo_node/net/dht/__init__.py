"""Kademlia DHT with provider records and no values."""
