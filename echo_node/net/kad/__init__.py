"""The DHT: Kademlia with provider records and no values. It knows keys and peers, and nothing of what the keys name."""
