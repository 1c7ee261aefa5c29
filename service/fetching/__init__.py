"""Images that are URLs: which hosts and addresses are allowed, and the download itself.

It hands on the bytes of each image.
It knows nothing of how the request named the URL or of what the bytes contain.
"""
