"""Keeps libtiff, the C library with which Pillow decodes compressed TIFFs, from writing to stderr.

libtiff writes a line for each error in the data: a file of 162 bytes can make it write 115,700 lines. Pillow
switches its warnings off, but not its errors, and has no setting for them. Knows nothing of files or pixels.
"""

from __future__ import annotations

import ctypes

from PIL import _imaging, features


def silence_libtiff() -> None:
    """Sets libtiff's error handler to none, for all threads of the process.

    Pillow's extension module is linked to libtiff, so the function is found through it. Raises
    `AttributeError` if it is not found, because then any caller could fill the log.
    """
    if features.check("libtiff"):
        ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler(None)
