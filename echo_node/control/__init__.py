"""Local control of a running node over a Unix socket in its state folder.

Only the owner of the folder can connect.
"""
