"""A server that speaks S3, for lakes in an object store: moto's, on a free port of loopback."""

from __future__ import annotations

from types import TracebackType
from typing import Self
from urllib.request import Request, urlopen

from moto.server import ThreadedMotoServer


class S3Server:
    """One server with one bucket. `environment` is what its clients need, the credentials among it."""

    def __init__(self, bucket: str = "lake") -> None:
        self.bucket = bucket
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.get_host_and_port()
        return f"http://{host}:{port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which the libraries find it."""
        return {
            "AWS_ACCESS_KEY_ID": "waypost", "AWS_SECRET_ACCESS_KEY": "a secret", "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    def __enter__(self) -> Self:
        self._server.start()
        with urlopen(Request(f"{self.url}/{self.bucket}", method="PUT"), timeout=60):
            return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.stop()
