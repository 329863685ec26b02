"""What looks like a credential, in settings that others may read. Pure.

The chart goes by the same two expressions (charts/spillway/files/credentials.yaml);
tests/chart/test_mistakes.py compares.
"""

from __future__ import annotations

import re

NAME = re.compile(
    r"(?i)(token|password|passwd|passphrase|secret"
    r"|(api|access|private|signing|encryption|account|storage|shared|master)_?key|credentials?"
    r"|(^|_)(pass|pwd|pat|auth|dsn)|authorization|cookies?|connection_?string"
    r"|(otlp(_[a-z]+)?|custom|http|request|extra)_headers)(_json)?$"
)
VALUE = re.compile(
    r"^(sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA[0-9A-Z]{12}|eyJ[A-Za-z0-9_-]+\.eyJ)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/@ ]*:[^/@ ]+@"
    r"|(?i:password|secret|api[-_]?key|access[-_]?token|auth[-_]?token|[?&]token)[\"']?[=:] *[\"']?[^&$ \"']"
    r"|(?i:authorization[\"']?[=:] *[\"']?([a-z]+( |%20)+)?[^&$ \"'][^ \"']{7})"
    r"|(?i:\bbearer( |%20)+[a-z0-9._~+/-]{8})"
)


def is_credential_argument(argument: str) -> bool:
    """Whether vLLM's argument (`value`, `--flag=value`) is one, by its value; names are those of extra_arguments.py."""
    return bool(VALUE.search(argument) or VALUE.search(re.sub(r"^-[^=]*=", "", argument)))
