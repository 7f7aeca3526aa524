"""Hostile bytes for whatever takes bytes from outside: `python -m tests.fuzz`.

Nothing is imported here: coverage is counted only in what is imported after the fuzzer.
"""
