"""A pytest plugin (`-p ascend_package.beside`): vllm-ascend with its stand-ins, and its patches of vLLM in force, as in
each process of an engine."""

from __future__ import annotations

from ascend_package import standins

standins.install()

from vllm_ascend.utils import adapt_patch, register_ascend_customop  # noqa: E402

adapt_patch(is_global_patch=True)
adapt_patch()
register_ascend_customop()
