# Stands where vllm-ascend's own image would, as BASE of docker/engine-ascend.Dockerfile; docs/ascend.md lists what of it
# is real. BASE: the lane's image of simulated engines. VLLM, TORCH_NPU, CANN: the versions that it says it has.
ARG BASE
FROM ${BASE}
ARG VLLM=0.23.0
ARG TORCH_NPU=2.10.0.post4
ARG CANN=9.1.0
USER 0:0
WORKDIR /
# What the Dockerfile has to bring must not be here already, or its check would find that instead.
COPY requirements/engine.txt /tmp/engine.txt
RUN python3 -m ensurepip --default-pip \
    && pip uninstall --yes --root-user-action ignore -r /tmp/engine.txt \
    && pip uninstall --yes --root-user-action ignore spillway-settings spillway-connector spillway-ctl spillway-engine \
    && rm /tmp/engine.txt \
    && ! python3 -c "import spillway_engine" && ! python3 -c "import xxhash"
COPY --from=vllm-ascend vllm_ascend /opt/vllm-ascend/vllm_ascend
COPY --from=vllm-ascend vllm_ascend.egg-info /opt/vllm-ascend/vllm_ascend.egg-info
RUN site=$(python3 -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
    && mv /opt/vllm-ascend/* "$site" && rmdir /opt/vllm-ascend \
    && for named in "vllm-${VLLM}" "torch_npu-${TORCH_NPU}"; do \
         mkdir "$site/$named.dist-info" \
         && printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "${named%%-*}" "${named#*-}" >"$site/$named.dist-info/METADATA" \
         || exit 1; \
       done
# CANN as far as the start script and the engine service look at it.
COPY tests/cluster/images/ascend_set_env.sh /usr/local/Ascend/ascend-toolkit/set_env.sh
RUN folder=/usr/local/Ascend/ascend-toolkit/latest/$(uname -m)-linux \
    && mkdir -p "$folder" && echo "version=${CANN}" >"$folder/ascend_toolkit_install.info"
