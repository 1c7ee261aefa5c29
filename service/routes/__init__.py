"""The paths of the service: their handlers, the shapes of their answers and their OpenAPI description.

It hands on requests for embeddings to the pipeline, and asks the engine about the model and its state.
It knows nothing of bodies, images or batches.
"""
