"""Connections, and what surrounds every request: HTTP framing, headers, request ids, API keys, CORS, the log.

It hands on requests that may proceed, and refuses the others with the one error body.
It knows nothing of what a request asks for.
"""
