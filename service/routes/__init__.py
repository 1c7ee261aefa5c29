"""The paths of the service: their handlers, the shapes of their answers and their OpenAPI description.

It hands requests for embeddings to the pipeline, and questions about the model to the engine.
It knows nothing of bodies, images or batches.
"""
