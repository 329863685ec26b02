# An engine on NVIDIA GPUs: vLLM's own image plus the connector and the engine service.
# Build from the repository's root:
#   docker build -f docker/engine-cuda.Dockerfile -t spillway-engine:0.1.0-cuda .
# VLLM: 0.23, 0.30 or 0.32, the vLLM of BASE; the chart asks for others than 0.23 as ...-cuda-vllm0.32.
# BASE: vLLM's image of that version. It has python3 with venv, and uv, which installs into it.
ARG BASE=docker.io/vllm/vllm-openai:v0.23.0

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
      org.opencontainers.image.description="vLLM on NVIDIA GPUs with KV offload to CPU memory, NVMe and Redis" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY requirements/engine.txt /tmp/engine.txt
COPY --from=build /wheels /tmp/wheels
# Without dependencies: vLLM, torch and numpy of the base must stay what they are. The last lines fail the build when one
# of them no longer suits, or BASE is of another vLLM than the image's tag will say.
RUN uv pip install --system --no-cache --no-deps --require-hashes -r /tmp/engine.txt \
    && uv pip install --system --no-cache --no-deps --no-index /tmp/wheels/*.whl \
    && rm -rf /tmp/engine.txt /tmp/wheels \
    && python3 -c "import spillway_engine, spillway_connector.config, spillway_connector.tiers.sealed, blake3, hiredis, obstore, redis, xxhash, msgspec, yaml, numpy" \
    && python3 -c "import importlib.metadata, sys; found = importlib.metadata.version('vllm'); \
found.startswith('${VLLM}.') or 'dev' in found or sys.exit(f'VLLM=${VLLM}: BASE has vLLM {found}; set VLLM to that, or another BASE')"
# USER: PyTorch asks for its name, and 10001 is in no password file. HOME: caches of compiled kernels.
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 USER=spillway HOME=/tmp
USER 10001:10001
WORKDIR /tmp
EXPOSE 8100 8200 8300
ENTRYPOINT ["python3", "-m", "spillway_engine"]
CMD ["--config", "/etc/spillway/engine.yaml"]
