"""Peer discovery: seeds, the address book, mDNS and peer exchange."""
