"""Every hot path against a peer or a physical limit, in the same run. `python -m benchmarks.NAME`"""
