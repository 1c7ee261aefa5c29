"""Several processes that serve as one: API servers, one process for each device, and a supervisor.

It runs the same app as a single process; only the replicas are in other processes.
It knows nothing of bodies, images or answers.

    clients ──► API servers ──patches──► devices
                (HTTP, decoding,  ◄──embeddings──
                 queue, answers)

Why: one Python process can parse, decode and answer only a part of what a GPU encodes, and a fault of one GPU
makes CUDA fail in its whole process. If one of the processes ends unexpectedly, all of them end.
"""
