"""vLLM's parser of the server's arguments, as far as pods without a server use it."""

from __future__ import annotations

from vllm.utils.argparse_utils import FlexibleArgumentParser


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    parser.add_argument("--headless", action="store_true", required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", type=int, required=True)
    return parser
