# The service: API, scheduler, web page, command line. It has no torch; jobs train on a Ray cluster of boost-trainer.
#
#   docker build --file docker/api.Dockerfile --tag boost-api:0.2.0 .
#
# The base image is pinned by version, not by digest: give one where you mirror it, as
# --build-arg PYTHON_IMAGE=registry.example.org/python@sha256:…. Ray wants the same Python in both images.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS builder
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY boost_core boost_core
COPY examples examples
COPY service service
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/boost \
    && pip --python /opt/boost/bin/python install --constraint constraints.txt '.[service,trackers]'

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="boost-api" \
      org.opencontainers.image.description="BOOST Service: API, scheduler, web page and command line" \
      org.opencontainers.image.licenses="Apache-2.0"
# The links are for shells that forget PATH, such as Kubernetes' probes and `docker exec`.
RUN groupadd --gid 65532 boost \
    && useradd --uid 65532 --gid 65532 --create-home --no-log-init boost \
    && install --directory --owner=65532 --group=65532 --mode=0700 /var/lib/boost \
    && ln -s /opt/boost/bin/boost /opt/boost/bin/ray /usr/local/bin/
COPY --from=builder /opt/boost /opt/boost
COPY docker/healthcheck.py /opt/boost/healthcheck.py
ENV PATH=/opt/boost/bin:$PATH \
    HOME=/home/boost \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    BOOST_HOME=/var/lib/boost \
    BOOST_HOST=0.0.0.0
USER 65532:65532
WORKDIR /home/boost
# All that is written; the rest of the file system may be read-only. Ray's sockets and logs are in /tmp.
VOLUME ["/tmp", "/home/boost", "/var/lib/boost"]
EXPOSE 8900
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "/opt/boost/healthcheck.py"]
ENTRYPOINT ["boost"]
CMD ["serve"]
