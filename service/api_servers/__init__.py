"""Several processes that serve HTTP for one that owns the devices.

    clients ──► supervisor ──sockets──► API servers ──patches──► supervisor's devices
                (accepts)               (HTTP, decoding,  ◄──embeddings──
                                         queue, answers)

One Python process can parse, decode and answer for a part of what a GPU encodes. Each API server is the whole
app, with its own queue; only the replicas are elsewhere. The supervisor accepts connections and hands them
out, loads the model, and gives each device the batches of the API servers in turn. If one of the processes
ends unexpectedly, all end.

Messages travel over socket pairs, bulk data in memory that the processes share.
"""
