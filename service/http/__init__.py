"""Connections and all that surrounds a request: HTTP framing, headers, request ids, API keys, CORS, the log.

It hands on the requests that may proceed, and refuses all others with the one error body.
It knows nothing of images, options or the model.
"""
