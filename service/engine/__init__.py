"""The replicas of the model, from loading to their end, and the state of the server that follows from it.

It hands the queue to the replicas, and says whether requests are taken.
It knows nothing of HTTP or of images.
"""
