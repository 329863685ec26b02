# An engine pod whose vLLM is a simulator: the real engine service, its middleware, drain and settings, answers made up.
# BASE: Spillway's own tools image, which has everything that both need.
ARG BASE=spillway-tools:0.1.0
FROM ${BASE}
COPY services/simulator/src /opt/simulated
COPY tests/cluster/images/engine_stand_in /opt/simulated
# The shape of the model, for the memory arithmetic; a simulator has no weights.
COPY tests/cluster/images/model-config.json /opt/spillway/models/smollm2-135m-instruct/config.json
ENV PYTHONPATH=/opt/simulated
ENTRYPOINT ["python3", "-m", "spillway_engine"]
CMD ["--config", "/etc/spillway/engine.yaml"]
