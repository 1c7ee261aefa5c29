"""What waits for a device: admission by tokens, order, batches, deadlines and failures.

It hands batches to devices, and each request its embeddings or its error.
It knows nothing of HTTP, of image files or of the encoder.
"""
