"""The container's health check: exit code 0 while the server takes requests, else 1 and the reason.

The port comes from the environment, so set it there and not by a flag. Needs nothing but Python.
"""

from __future__ import annotations

import os
import sys
import urllib.request


def main() -> int:
    port = os.environ.get("VISION_SIDECAR_PORT") or "8080"
    # Straight to the server: a proxy that the environment names is for the way out.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/readyz", timeout=4):
            return 0
    except OSError as error:
        sys.stdout.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
