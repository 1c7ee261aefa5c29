"""The body of a request becomes images and options, within limits on bytes, images and time.

It hands on the bytes or the URL of each image, and the options with their defaults filled in.
It knows nothing of pixels, of how a URL is fetched or of the answer's bytes.
"""
