"""The process of one device: loads the model and takes the batches of all API servers in turn.

It hands batches to a replica and the embeddings back to the API server that sent the batch.
It knows nothing of HTTP, of images or of the other devices' work.
"""
