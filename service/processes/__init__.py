"""Several processes that serve HTTP, and one for each device.

    clients ──► supervisor ──sockets──► API servers ──patches──► devices
                (accepts)               (HTTP, decoding,  ◄──embeddings──
                                         queue, answers)

One Python process can parse, decode and answer for a part of what a GPU encodes, and a fault of one GPU makes
CUDA fail for all of a process. Each API server is the whole app, with its own queue; only the replicas are
elsewhere. Each device's process loads the model and takes the batches of the API servers in turn. The
supervisor accepts connections and hands them out, and starts, watches and ends the others. If one of the
processes ends unexpectedly, all end.

Messages travel over socket pairs, bulk data in memory that the processes share.
"""
