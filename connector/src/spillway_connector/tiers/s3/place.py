"""Place of a tier's objects. Light to import: no client library."""

from __future__ import annotations

from dataclasses import dataclass, fields

from spillway_settings.values.offload import S3Tier


@dataclass(frozen=True, slots=True)
class S3Place:
    """The bucket and endpoint that hold a tier's objects. Credentials come from the process's environment, see
    client.py.

    prefix: what keys begin with. endpoint: None: AWS's own of the region. ca_file: a file with the authorities that
    are trusted besides the system's.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str = S3Tier().region
    path_style: bool = True
    ca_file: str | None = None

    @classmethod
    def of(cls, store: object) -> S3Place:
        """The place that settings name. store: has these fields, and others."""
        return cls(**{field.name: getattr(store, field.name) for field in fields(cls)})

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" + (f" at {self.endpoint}" if self.endpoint else "")

    @property
    def name(self) -> bytes:
        """The same in all processes that use it: the region of a bucket at AWS follows from its name."""
        return f"s3\n{self.endpoint or 'aws'}\n{self.bucket}\n{self.prefix}".encode()
