"""Settings, command-line flags, logs and limits of the process.

It hands on one checked, immutable `Settings`.
It knows nothing of what the settings are used for.
"""
