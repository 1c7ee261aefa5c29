"""The bytes of an image file become RGB pixels, upright, within limits, and then patches in the queue.

It hands on one array [height, width, 3] for each image, preprocessed into patches.
It knows nothing of HTTP or of batches.
"""
