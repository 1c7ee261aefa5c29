"""Results that are kept: the tokens of images in files, under a uuid, and pooled vectors in memory.

It hands tokens to an LLM server and to later requests for the same image.
It knows nothing of HTTP, of decoding or of what an LLM server does with the tokens.
"""
