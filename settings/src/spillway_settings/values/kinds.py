"""Types of values that several settings share: bounds, form, and in words what is needed.

A credential may be pasted where the name or the entry of a Secret belongs, and Helm repeats what does not match a
pattern. So the types of those have none; the chart judges them without repeating them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

SECONDS_MAX = 1_000_000_000
BLANKS = "\\s\u00a0\u2000-\u200b\u3000\ufeff"
DNS_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DNS_NAME = rf"{DNS_LABEL}(\.{DNS_LABEL})*"
HOST_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
HOST_NAME = rf"{HOST_LABEL}(\.{HOST_LABEL})*"
LABEL_VALUE = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
REGISTRY_HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]+)?(/[a-z0-9]+((\.|_{1,2}|-+)[a-z0-9]+)*)*"
FOLDER_PARTS = r"(/([^/.\s$]([^/$]*[^/\s$])?|\.[^/.\s$]([^/$]*[^/\s$])?|\.\.[^/$]*[^/\s$]))+/?"
IP4_PART = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A map of settings: `pre_stop_seconds` is the key `preStopSeconds`."""


# Numbers.
Seconds = Annotated[float, Meta(gt=0, le=SECONDS_MAX)]
SecondsOrNone = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]  # 0: none
LongSeconds = Annotated[float, Meta(ge=1, le=SECONDS_MAX)]
WholeSeconds = Annotated[int, Meta(ge=1, le=SECONDS_MAX)]
WholeSecondsOrNone = Annotated[int, Meta(ge=0, le=SECONDS_MAX)]
Pods = Annotated[int, Meta(ge=0, le=10_000)]
SomePods = Annotated[int, Meta(ge=1, le=10_000)]

# Read by spillway_settings.byte_sizes; the chart says what is wrong with one.
Size = Annotated[str | float, Meta(description="512MiB, 64Gi, 1TB or a number of bytes")]
Cores = (
    Annotated[str, Meta(pattern=r"^([0-9]*[1-9][0-9]*m?|[0-9]*\.[0-9]{1,3}|[0-9]+\.)$")]
    | Annotated[float, Meta(gt=0, description='a number of cores, such as 2, "1.5" or 500m')]
)
Disruption = (
    Annotated[int, Meta(ge=1)]
    | Annotated[
        str,
        Meta(
            pattern="^([1-9][0-9]?|100)%$",
            description='a number of pods from 1 on or a share from "1%" to "100%" (with none, no node can be drained)',
        ),
    ]
)

# Words. YAML 1.1 reads a bare on or off as true or false, which means the same.
OnOff = Annotated[str | bool, Meta(extra_json_schema={"enum": ["on", "off", True, False]})]
AutoOnOff = Annotated[str | bool, Meta(extra_json_schema={"enum": ["auto", "on", "off", True, False]})]
AutoOff = Annotated[str | bool, Meta(extra_json_schema={"enum": ["auto", "off", False]})]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]

# Names.
NamePart = Annotated[
    str,
    Meta(
        max_length=63,
        pattern="^([a-z]([-a-z0-9]*[a-z0-9])?)?$",
        description="a name of small letters, digits and dashes that begins with a letter",
    ),
]
NamespaceName = Annotated[
    str,
    Meta(
        max_length=63,
        pattern=f"^({DNS_LABEL})?$",
        description="the name of a namespace (small letters, digits and dashes)",
    ),
]
ObjectName = Annotated[
    str,
    Meta(
        max_length=253,
        pattern=f"^({DNS_NAME})?$",
        description="the name of an object (small letters, digits, dashes and dots)",
    ),
]
GroupName = Annotated[
    str,
    Meta(
        pattern="^[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?$",
        description="a part of object names (at most 24 small letters, digits and dashes)",
    ),
]
SecretName = Annotated[str, Meta(description="the name of a Secret, never what is in it")]
SecretEntry = Annotated[str, Meta(max_length=253, description="which entry of the Secret it is")]
LabelKey = Annotated[
    str,
    Meta(
        pattern=f"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?{LABEL_VALUE}$",
        description="a label's key, such as team or example.com/team",
    ),
]
Labels = dict[
    LabelKey,
    Annotated[
        str,
        Meta(
            max_length=63,
            pattern="^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
            description="a label's value (at most 63 letters, digits, dashes, dots and underscores, with a letter or "
            "digit at both ends)",
        ),
    ],
]
Annotations = dict[LabelKey, str]
EnvironmentName = Annotated[
    str,
    Meta(
        pattern="^[-._a-zA-Z][-._a-zA-Z0-9]*$",
        description="the name of an environment variable (letters, digits and underscores, no digit first)",
    ),
]
ServedName = Annotated[
    str,
    Meta(
        min_length=1,
        pattern=rf"^[^{BLANKS}]([^\n\r\t]*[^{BLANKS}])?$",
        description="a name without blanks at its ends and without line breaks",
    ),
]
OptionalServedName = Annotated[
    str,
    Meta(
        pattern=rf"^([^{BLANKS}]([^\n\r\t]*[^{BLANKS}])?)?$",
        description="a name without blanks at its ends and without line breaks",
    ),
]
PrometheusLabel = Annotated[str, Meta(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$", description="a label's name in Prometheus")]

# Addresses and networks.
Host = Annotated[
    str,
    Meta(
        max_length=253,
        pattern=rf"^((\*\.)?{HOST_NAME})?$",
        description="a DNS name in small letters, without a scheme, port or path",
    ),
]
GivenHost = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=253,
        pattern=rf"^(\*\.)?{HOST_NAME}$",
        description="a DNS name in small letters, without a scheme, port or path",
    ),
]
Domain = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=253,
        pattern=f"^{HOST_NAME}$",
        description="a domain in small letters, such as cluster.local",
    ),
]
Address = Annotated[
    str,
    Meta(pattern="^[A-Za-z0-9._:-]*$", description="a host name or IP address, without a scheme or path"),
]
MediaDomain = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$",  # vLLM compares it with the lower-case host of a URL
        description="the host of a URL in lower case, without a scheme, port or path",
    ),
]
Network = Annotated[
    str,
    Meta(
        pattern=rf"^(({IP4_PART}\.){{3}}{IP4_PART}/(3[0-2]|[12]?[0-9])"
        "|[0-9a-fA-F]*:[0-9a-fA-F:.]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$",
        description="a network as address/bits, such as 10.0.0.0/8",
    ),
]
IngressPath = Annotated[
    str,
    Meta(
        pattern=r"^/$|^(/([^/.*%\s][^/*%\s]*|\.[^/.*%\s][^/*%\s]*|\.\.[^/*%\s]+))+/?$",
        description="a path that begins with /, without *, blanks, // and .. in it (what lies below it is meant too)",
    ),
]
HttpMethods = Annotated[
    list[Annotated[str, Meta(pattern="^([A-Z]+|[*])$", description="a method of HTTP in capital letters, or *")]],
    Meta(max_length=64, extra_json_schema={"uniqueItems": True}),
]
HttpNames = Annotated[
    list[Annotated[str, Meta(pattern="^[A-Za-z0-9!#$%&'*+.^_`|~-]+$", description="a name of HTTP, or *")]],
    Meta(max_length=64, extra_json_schema={"uniqueItems": True}),
]

# Folders.
Folder = Annotated[
    str,
    Meta(
        pattern=f"^{FOLDER_PARTS}$",
        description="an absolute folder below /, without .. and $ in it and without blanks at the ends of its names",
    ),
]
OptionalFolder = Annotated[
    str,
    Meta(
        pattern=f"^({FOLDER_PARTS})?$",
        description="an absolute folder below /, without .. and $ in it and without blanks at the ends of its names",
    ),
]
ServerFolder = Annotated[
    str,
    Meta(
        pattern=r"^(/(.*[^\s])?)?$",
        description="an absolute folder of the server, without a blank at its end",
    ),
]

# Images.
Registry = Annotated[
    str,
    Meta(
        pattern=f"^({REGISTRY_HOST})?$",
        description="a host, perhaps with a port and a path, without a scheme and without a slash at the end",
    ),
]
Repository = Annotated[
    str,
    Meta(
        pattern=r"^([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+((\.|_{1,2}|-+|/)[a-z0-9]+)*$",
        description="an image's name in small letters, without its tag or digest, which have settings of their own",
    ),
]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
Tag = Annotated[
    str,
    Meta(
        max_length=128,
        pattern="^([A-Za-z0-9_][A-Za-z0-9_.-]*)?$",
        description="an image's tag (at most 128 letters, digits, dots, dashes and underscores)",
    ),
]
Digest = Annotated[
    str,
    Meta(
        pattern="^(sha256:[0-9a-f]{64})?$",
        description="a digest (sha256: and 64 hexadecimal digits; a version is the tag)",
    ),
]

Origin = Annotated[
    str,
    Meta(
        pattern=r"^([*]|null|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?)$",
        description="https://HOST[:PORT] in small letters and without a path, or *",
    ),
]
ResourceName = Annotated[
    str,
    Meta(
        pattern="^([a-z0-9.-]+/[A-Za-z0-9._-]+|hugepages-(64Ki|2Mi|32Mi|512Mi|1Gi|16Gi))$",
        description="the name of an extended resource, such as rdma/hca or hugepages-2Mi",
    ),
]
ResourceAmount = (
    Annotated[int, Meta(ge=1)]
    | Annotated[str, Meta(pattern="^[1-9][0-9]*([KMGTPE]i?|k)?$", description="a quantity, such as 1 or 16Gi")]
)

# Lists and maps that others read.
CopyRow = Annotated[
    list[Any],
    Meta(
        min_length=2,
        max_length=2,
        description="bytes of a piece, and the way that pieces up to it are copied: loop, batch or staged",
    ),
]
Anything = dict[str, Any]
AnyObject = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "required": ["apiVersion", "kind", "metadata"],
            "properties": {
                "apiVersion": {"type": "string"},
                "kind": {"type": "string"},
                "metadata": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
        }
    ),
]
