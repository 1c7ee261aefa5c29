"""Downloads images that are given as URLs, from the hosts and addresses that the settings allow.

It hands on the bytes of each image.
It knows nothing of how the request named the URL or of what the bytes contain.
"""
