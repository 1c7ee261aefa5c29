"""The process that starts, watches and ends the others.

It hands connections to the API servers and the joined metrics of all processes to the one that is scraped.
It knows nothing of requests or tensors.
"""
