"""The LLM server behind this one: its requests come here, and their images are embedded on the way.

It hands each request on, with uuid and grid in place of every image, and streams the answer back.
It knows nothing of decoding, of devices or of what the answer says.
"""
