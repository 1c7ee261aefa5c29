"""What can go wrong before the first image, as an operator should read it."""

from __future__ import annotations


class ModelError(Exception):
    """A checkpoint, a device or an attention backend that cannot be used; the message is one clear line."""
