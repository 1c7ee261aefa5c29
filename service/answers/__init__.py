"""Turns embeddings into the body of an answer, in each form that is served.

It hands on the body as pieces of bytes, with its media type.
It knows nothing of requests or of how the embeddings were computed.
"""
