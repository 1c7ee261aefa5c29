"""Keeps libtiff, the C library with which Pillow decodes compressed TIFFs, from writing to stderr.

libtiff writes a line for each error in the data: a file of 162 bytes can make it write 115,700 lines. Pillow
switches its warnings off, but not its errors, and has no setting for them. Knows nothing of files or pixels.
"""

from __future__ import annotations

import ctypes
import logging

from PIL import _imaging, features

logger = logging.getLogger(__name__)


def silence_libtiff() -> None:
    """Sets libtiff's error handler to none, for all threads of the process.

    Pillow's extension module is linked to libtiff, so the function is found through it. Logs a warning if it
    is not found, as in a Pillow that was linked statically.
    """
    if not features.check("libtiff"):
        return
    try:
        ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler(None)
    except AttributeError:
        logger.warning("this Pillow's libtiff cannot be silenced: broken TIFFs may write lines to stderr")
