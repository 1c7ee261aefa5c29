"""Settings, command-line flags, logs and limits of the process.

It hands on an immutable `Settings` whose values are checked.
It knows nothing of how the settings are used.
"""
