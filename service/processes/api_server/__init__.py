"""One process that serves HTTP: the whole app, with its own queue, on replicas in other processes.

It hands batches of patches to the processes of the devices and gets embeddings back.
It knows nothing of models or of how the other processes are watched.
"""
