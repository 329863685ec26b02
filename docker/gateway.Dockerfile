# The gateway: an interpreter, what requirements/gateway.txt pins, and two distributions. Also runs `helm test`.
# Build from the repository's root:  docker build -f docker/gateway.Dockerfile -t spillway-gateway:0.1.0 .
# The Kubernetes client's asynchronous half, 68 MB that nothing imports, is left out.
# BASE: any image with Python 3.11 and its venv module as `python3`; both stages use it.
ARG BASE=docker.io/library/python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements/build.txt requirements/gateway.txt requirements/
RUN python3 -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r requirements/build.txt
RUN python3 -m venv /opt/spillway && /opt/spillway/bin/pip install --require-hashes -r requirements/gateway.txt
COPY settings settings
COPY gateway gateway
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./settings ./gateway \
    && /opt/spillway/bin/pip install --no-deps --no-index /wheels/*.whl \
    && rm -r /opt/spillway/lib/python3*/site-packages/kubernetes/aio \
    && /opt/spillway/bin/python -m compileall -q /opt/spillway/lib \
    && /opt/spillway/bin/pip uninstall --quiet --yes pip setuptools

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="spillway-gateway" \
      org.opencontainers.image.description="OpenAI-compatible gateway that routes by prefix" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/spillway /opt/spillway
# Python writes nothing, so the root file system may be read-only.
ENV PATH=/opt/spillway/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["python3", "-m", "spillway_gateway"]
CMD ["--config", "/etc/spillway/gateway.yaml"]
