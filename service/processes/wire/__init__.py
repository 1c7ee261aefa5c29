"""What processes send each other: messages over socket pairs, and bulk data in shared memory.

It hands on what was sent, with its files, or says that the other end is gone.
It knows nothing of which process does what with it.
"""
