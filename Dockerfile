# The server in a container: it runs without root and writes only to the volume /cache and to /tmp.
#
#     docker build -t vision-sidecar .                              for NVIDIA GPUs
#     docker build -t vision-sidecar:cpu --build-arg TORCH=cpu .    for CPUs, and much smaller
#
# CUDA comes with the wheels of torch. The host needs NVIDIA's driver and container toolkit, but no CUDA.

ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS build
ARG TORCH=cuda
ENV PIP_NO_CACHE_DIR=1
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY deploy/install.sh deploy/constraints.txt deploy/
# Empty packages stand in for the code, so that a change of the code does not rebuild the layer with the dependencies.
# uv may have installed torch; it is not needed afterwards.
RUN mkdir models service && touch models/__init__.py service/__init__.py \
    && PYTHON=python TORCH=$TORCH deploy/install.sh /opt/venv . \
    && /opt/venv/bin/python -m pip uninstall -q -y uv
COPY models models
COPY service service
COPY deploy/healthcheck.py deploy/
RUN /opt/venv/bin/python -m compileall -q models service

FROM python:${PYTHON}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="vision-sidecar" \
    org.opencontainers.image.description="Image embeddings over HTTP, with the vision encoder of a Qwen3-VL checkpoint" \
    org.opencontainers.image.version="$VERSION" \
    org.opencontainers.image.licenses="Apache-2.0"

# Triton compiles its launchers with a C compiler when the server starts.
# No versions: Debian keeps only the newest build of a package.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /cache --shell /usr/sbin/nologin sidecar \
    && install -d -o sidecar -g sidecar /cache

# The same folder as in the build, because the virtual environment points to the code in it.
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app

# /cache keeps downloads and compiled kernels: as a volume it makes the second start fast. The MALLOC_ variables make
# malloc return large buffers to the system, so that the size of the process is the memory in use. /dev/shm is memory in
# every container. Docker gives it 64 MB, which the server uses and reports; --shm-size gives it more.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    CUDA_CACHE_PATH=/cache/cuda \
    MALLOC_MMAP_THRESHOLD_=1048576 \
    MALLOC_TRIM_THRESHOLD_=16777216 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    VISION_SIDECAR_HOST=0.0.0.0 \
    VISION_SIDECAR_HANDOFF_DIR=/dev/shm/vision-sidecar/tokens \
    VISION_SIDECAR_LOG_FORMAT=json \
    VISION_SIDECAR_SHUTDOWN_DELAY_S=5
USER 10001:10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "/app/deploy/healthcheck.py"]
ENTRYPOINT ["vision-sidecar"]
CMD ["serve"]
