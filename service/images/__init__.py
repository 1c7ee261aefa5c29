"""Turns the bytes of image files into upright RGB pixels, within limits, and those into patches in the queue.

It hands on the patches of each image, made from an array [height, width, 3].
It knows nothing of HTTP or of batches.
"""
