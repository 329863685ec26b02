# Everything of Spillway that needs no engine, for looking at a running installation from inside the cluster:
#   python3 -m spillway_gateway --check --config FILE    is this configuration valid?
#   spillway tier status|ls|verify|purge                  what a shared tier holds, whether it is whole
#   spillway check FILE                                   are these values of the chart right?
# Build from the repository's root:  docker build -f docker/tools.Dockerfile -t spillway-tools:0.1.0 .
ARG BASE=docker.io/library/python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements/build.txt requirements/tools.txt requirements/
RUN python3 -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r requirements/build.txt
RUN python3 -m venv /opt/spillway && /opt/spillway/bin/pip install --require-hashes -r requirements/tools.txt
COPY settings settings
COPY connector connector
COPY gateway gateway
COPY services/ctl services/ctl
COPY charts/spillway charts/spillway
COPY services/engine services/engine
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./settings ./connector ./gateway ./services/ctl ./services/engine \
    && /opt/spillway/bin/pip install --no-deps --no-index /wheels/*.whl \
    && rm -r /opt/spillway/lib/python3*/site-packages/kubernetes/aio \
    && /opt/spillway/bin/python -m compileall -q /opt/spillway/lib \
    && /opt/spillway/bin/pip uninstall --quiet --yes pip setuptools

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="spillway-tools" \
      org.opencontainers.image.description="Spillway's command-line tools, without an engine" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/spillway /opt/spillway
ENV PATH=/opt/spillway/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
CMD ["spillway", "tier", "--help"]
