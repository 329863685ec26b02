"""`python -m spillway_engine.headless ARGUMENTS...`: the ranks of a replica's further pod, without a server.

It is what `vllm serve --headless` does; the `vllm` command needs metadata that the CPU wheel lacks.
"""

from __future__ import annotations

from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()  # type: ignore[no-untyped-call]
    arguments.api_server_count = 0
    run_headless(arguments)
