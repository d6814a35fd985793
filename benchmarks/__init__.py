"""Benchmarks: `python -m benchmarks` measures Bagua beside its peers, in one run."""
