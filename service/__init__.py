"""The HTTP service. Knows requests; hands arrays to `models` and gets embeddings back."""

import os

# OpenMP reads this when torch is imported. By default its threads spin while they wait for each other, and
# where decoding takes a core from one of them, each of a forward pass's many waits costs the others a time
# slice: an encode on a CPU then takes up to a hundred times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
