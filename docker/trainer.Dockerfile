# A node of the Ray cluster on which jobs train: torch, and Triton where there is CUDA.
#
#   docker build --file docker/trainer.Dockerfile --tag boost-trainer:0.2.0 .
#   docker build --file docker/trainer.Dockerfile --tag boost-trainer:0.2.0-cpu \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
# torch's wheel brings CUDA's libraries; the host has the driver and NVIDIA's container toolkit. The base image is pinned
# by version, not by digest: give one where you mirror it. Ray wants the same Python in both images.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS builder
ARG TORCH_INDEX=https://pypi.org/simple
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
# torch comes first and alone: this layer is big, and the index decides which build it is.
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/boost \
    && pip --python /opt/boost/bin/python install --index-url "${TORCH_INDEX}" --no-deps --constraint constraints.txt \
        torch
COPY boost_core boost_core
COPY examples examples
COPY service service
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/boost/bin/python install --constraint constraints.txt '.[service,trainer]'

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="boost-trainer" \
      org.opencontainers.image.description="BOOST Service: a node of the Ray cluster on which jobs train" \
      org.opencontainers.image.licenses="Apache-2.0"
# NCCL finds InfiniBand, RoCE and EFA by libibverbs and its providers; without them it takes TCP and says nothing. Triton
# compiles the launchers of its kernels with gcc. KubeRay's probes call wget, from a login shell, which forgets
# PATH: hence the links.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc=4:12.2.* ibverbs-providers=44.* libc6-dev=2.36-* \
        libibverbs1=44.* wget=1.21.* \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 65532 boost \
    && useradd --uid 65532 --gid 65532 --create-home --no-log-init boost \
    && install --directory --owner=65532 --group=65532 --mode=0700 /var/lib/boost \
    && ln -s /opt/boost/bin/boost /opt/boost/bin/ray /usr/local/bin/
COPY --from=builder /opt/boost /opt/boost
ENV PATH=/opt/boost/bin:$PATH \
    HOME=/home/boost \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    BOOST_HOME=/var/lib/boost \
    TRITON_CACHE_DIR=/tmp/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
WORKDIR /home/boost
# All that is written; the rest of the file system may be read-only. Ray's sockets and logs are in /tmp.
VOLUME ["/tmp", "/home/boost", "/var/lib/boost"]
EXPOSE 6379 8265 9400-9499
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["sh", "-c", "wget -q -O - http://127.0.0.1:52365/api/local_raylet_healthz | grep -q success"]
CMD ["ray", "start", "--help"]
