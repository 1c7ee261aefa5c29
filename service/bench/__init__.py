"""The benchmarks that a user can run: `vision-sidecar bench encoder` and `bench serve`.

It hands on tables and JSON with the figures that it measured.
It knows nothing of the inside of a server: `bench serve` measures one over HTTP.
"""
