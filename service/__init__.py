"""The HTTP service: start, the app, the map of one request in `pipeline.py`, errors and metrics.

It takes requests and hands arrays of pixels to `models`, which returns embeddings.
It knows nothing of how the encoder computes them.
"""

import os

# OpenMP reads this when torch is imported. By default its threads spin while they wait for each other, and
# where decoding takes a core from one of them, each of a forward pass's many waits costs the others a time
# slice: an encode on a CPU then takes up to a hundred times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
