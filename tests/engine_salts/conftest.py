"""The environments of other vLLM versions lack the gateway's tokenizer, which no test here needs."""

import sys
from importlib.util import find_spec
from types import ModuleType

if find_spec("fastokens") is None:
    sys.modules["fastokens"] = ModuleType("fastokens")
