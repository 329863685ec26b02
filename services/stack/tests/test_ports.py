import os
import socket

from spillway_stack.components import Component
from spillway_stack.ports import holder, is_free
from spillway_stack.preflight import port_problems


def test_a_taken_port_and_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken, by = is_free(port), holder(port)
        (problem,) = port_problems([Component("gateway", ["x"], port, "/ready", ports=(port,))])

    assert not taken
    assert by is not None and by.startswith(f"pid {os.getpid()} (")
    assert problem.startswith(f"port {port} (gateway) is held by pid {os.getpid()} (")
    assert problem.endswith("end it, or choose other ports with PORT=<number>")
    assert is_free(port)
    assert holder(port) is None
