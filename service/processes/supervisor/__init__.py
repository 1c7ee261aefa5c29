"""The process that starts, watches and ends the others.

It hands the listening socket to the API servers, and joined metrics to the API server that is scraped.
It knows nothing of requests or tensors.
"""
