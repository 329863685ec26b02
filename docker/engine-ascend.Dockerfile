# An engine on Ascend: vllm-ascend's own image plus the connector and the engine service.
# Build from the repository's root, once for each board:
#   docker build -f docker/engine-ascend.Dockerfile -t spillway-engine:0.1.0-ascend-a3 \
#     --build-arg BASE=quay.io/ascend/vllm-ascend:v0.23.0-a3 .
# Tags of BASE: v0.23.0 (Atlas A2), -a3, -310p, -a5, each also with -openeuler.
# VLLM: 0.23, 0.30 or 0.32, the vLLM of BASE. For the others than 0.23, BASE is v0.30.0 or v0.32.0rc1 of whoever ships it
# to you: docs/versions.md. No NPU has run any of them with Spillway.
ARG BASE=quay.io/ascend/vllm-ascend:v0.23.0

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements/build.txt requirements/
RUN python3 -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r requirements/build.txt
COPY settings settings
COPY connector connector
COPY services/ctl services/ctl
COPY charts/spillway charts/spillway
COPY services/engine services/engine
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./settings ./connector ./services/ctl ./services/engine

FROM ${BASE}
ARG VLLM=0.23
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="spillway-engine" \
      org.opencontainers.image.description="vLLM on Ascend with KV offload to CPU memory, NVMe and Redis" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY requirements/engine.txt /tmp/engine.txt
COPY --from=build /wheels /tmp/wheels
# Without dependencies: vLLM, torch and numpy of the base must stay what they are. The last lines fail the build when one
# of them no longer suits, or BASE is of another vLLM than the image's tag will say.
RUN pip install --no-cache-dir --no-deps --require-hashes -r /tmp/engine.txt \
    && pip install --no-cache-dir --no-deps --no-index /tmp/wheels/*.whl \
    && rm -rf /tmp/engine.txt /tmp/wheels \
    && python3 -c "import spillway_engine, spillway_connector.config, spillway_connector.tiers.sealed, blake3, hiredis, obstore, redis, xxhash, msgspec, yaml, numpy" \
    && python3 -c "import importlib.metadata, sys; found = importlib.metadata.version('vllm'); \
found.startswith('${VLLM}.') or 'dev' in found or sys.exit(f'VLLM=${VLLM}: BASE has vLLM {found}; set VLLM to that, or another BASE')"
# CANN's driver and the base's own files expect root; charts/spillway takes every capability but one away.
ENV PYTHONUNBUFFERED=1
COPY --chmod=0755 charts/spillway/files/start-ascend.sh /usr/local/bin/start-engine
ENTRYPOINT ["/usr/local/bin/start-engine"]
CMD ["--config", "/etc/spillway/engine.yaml"]
