"""Benchmarks for users: `vision-sidecar bench encoder` and `vision-sidecar bench serve`.

They print the measured figures as a table and write them as JSON.
They know nothing of the inside of a server: `bench serve` measures it over HTTP.
"""
