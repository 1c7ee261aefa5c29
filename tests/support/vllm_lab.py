"""The servers that a check with vLLM needs, for one checkpoint.

plain ──── stock vLLM with its own encoder, which also takes tensors in the body
near ───── the service, the door to:
by_dir ─── vLLM with the connector, which reads the store of `near`
far ────── the service with an API key, a small store and short leases, the door to:
by_url ─── vLLM with the connector, which fetches from `far`; it computes a prompt in small chunks
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.sidecar import Sidecar, free_port
from tests.support.vllm_server import VllmServer, connector_flag

API_KEY = "a-key-of-the-check"
CHUNK_TOKENS = 256  # of a prompt in one step of `by_url`
FAR_BYTES = 4 * 2**20  # room in the store of `far`
FAR_LEASE_S = 2.0

# vLLM keeps no prefixes of a model that could have linear attention but has none.
_FLAGS_OF_TYPE = {"qwen3_5": ["--no-enable-prefix-caching"]}


@dataclass(frozen=True)
class Lab:
    """The servers, all ready."""

    checkpoint: Path
    plain: VllmServer
    near: Sidecar
    by_dir: VllmServer
    far: Sidecar
    by_url: VllmServer


@contextmanager
def start_lab(model_type: str, checkpoint: Path, stores: Path, folder: Path) -> Iterator[Lab]:
    """Starts the servers for a checkpoint, all at once, and stops them at the end.

    `stores`: a folder in shared memory; `folder`: for logs and keys.
    """
    key_file = folder / "api-key"
    key_file.write_text(API_KEY)
    with ExitStack() as stack:

        def vllm(name: str, *flags: str) -> VllmServer:
            of_type = _FLAGS_OF_TYPE.get(model_type, [])
            server = VllmServer(checkpoint, folder / f"{name}.log", *flags, *of_type)
            stack.callback(server.stop)
            return server

        def sidecar(
            name: str, port: int, llm: VllmServer, *flags: str, api_key: str | None = None
        ) -> Sidecar:
            door = ["--llm-url", llm.url]
            server = Sidecar(port, checkpoint, stores / name, *door, *flags, api_key=api_key)
            stack.callback(server.close)
            return server

        far_port = free_port()
        source = {"url": f"http://127.0.0.1:{far_port}", "api_key_file": str(key_file), "timeout_s": 5}
        plain = vllm("plain", "--enable-mm-embeds")
        by_dir = vllm(
            "by-dir", "--enable-prompt-tokens-details", connector_flag({"dir": str(stores / "near")})
        )
        by_url = vllm("by-url", f"--max-num-batched-tokens={CHUNK_TOKENS}", connector_flag(source))
        near = sidecar("near", free_port(), by_dir, "--handoff-bytes", str(2**28))
        limits = ["--handoff-bytes", str(FAR_BYTES), "--handoff-lease-s", str(FAR_LEASE_S)]
        keys = ["--api-keys-file", str(key_file)]
        far = sidecar("far", far_port, by_url, *keys, *limits, api_key=API_KEY)
        near.start()
        far.start()
        for server in (plain, by_dir, by_url):
            server.wait()
        yield Lab(checkpoint, plain, near, by_dir, far, by_url)
