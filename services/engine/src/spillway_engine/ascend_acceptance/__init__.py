"""The acceptance test of an Ascend node: the transport's probe, answers with and without offload, and a multi-turn load
with and without batched copies. `python3 -m spillway_engine.ascend_acceptance`, docs/ascend.md."""
