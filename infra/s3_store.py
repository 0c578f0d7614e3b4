"""The object store in S3 or anything compatible with it; the only file that speaks boto3.

Traps that this file exists for:
- newer boto3 adds checksum headers and trailers that many stores refuse: both directions are set to `when_required`;
- the batch delete needs one of those headers in any case, so objects are deleted one by one;
- a body that is cut short in the middle is not retried by boto3: the whole download is retried here;
- boto3 accepts flipped bytes: readers check digests of their own, and uploads carry a Content-MD5 that stores enforce;
- a signed payload makes some stores hash it while they read it, at a fifth of the speed, and refuse large ones: the
  headers are signed, the Content-MD5 among them, and the payload is bound by that.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.exceptions

from infra.store import ObjectInfo, check_key, check_prefix
from schemas.errors import ObjectMissing, SettingError, StoreError

_CONNECT_S = 3.0
_ATTEMPTS = 3
_CHUNK_BYTES = 256 * 1024
_LEAST_RATE = 64 * 1024
"""Bytes per second; a download that is slower on the whole is given up, so that no call can last for ever."""
_POOL = 16
_PAGE = 1000

T = TypeVar("T")


class S3Store:
    """Objects in one bucket under one prefix. May be used from several threads at once.

    `endpoint_url` empty means AWS itself; `access_key` and `secret_key` None mean the usual credential chain.
    """

    def __init__(
        self,
        *,
        endpoint_url: str,
        bucket: str,
        prefix: str,
        region_name: str,
        access_key: str | None,
        secret_key: str | None,
        timeout_s: float,
    ) -> None:
        if "@" in urlsplit(endpoint_url).netloc:
            raise SettingError("s3.endpoint_url holds a user or password: give them as s3.access_key and s3.secret_key")
        self._where = f"object store {endpoint_url or 'AWS ' + region_name}, bucket {bucket!r}"
        self._bucket = bucket
        self._prefix = check_prefix(prefix.strip("/") + "/") if prefix.strip("/") else ""
        self._timeout_s = timeout_s
        self._client: Any = boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint_url or None,
            region_name=region_name,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            config=_config(timeout_s),
        )

    def __repr__(self) -> str:
        return f"<{self._where}>"

    def check(self) -> None:
        """Raise StoreError, within seconds, unless the bucket exists and may be listed."""
        self._call("list", self._client.list_objects_v2, Prefix=self._prefix, MaxKeys=1)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store an object whole. With `if_absent`, False when one was there already (a belt, never a fence)."""
        wanted = {"Key": self._full(key), "Body": data, "ContentMD5": _md5(data)}
        if not if_absent:
            self._call(f"put {key}", self._client.put_object, **wanted)
            return True
        try:
            self._client.put_object(Bucket=self._bucket, IfNoneMatch="*", **wanted)
        except botocore.exceptions.ClientError as error:
            if _status(error) == 412:
                return False
            if _status(error) != 501:
                raise self._explained(f"put {key}", error) from error
            return self.size(key) is None and self.put(key, data)  # a store that does not know conditional puts
        except botocore.exceptions.BotoCoreError as error:
            raise self._explained(f"put {key}", error) from error
        return True

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """The whole object. Raises ObjectMissing, or StoreError when it is larger than `max_bytes`."""
        full = self._full(key)
        for attempt in range(1, _ATTEMPTS + 1):
            answer = self._call(f"get {key}", self._client.get_object, Key=full)
            size_bytes = int(answer["ContentLength"])
            if max_bytes is not None and size_bytes > max_bytes:
                answer["Body"].close()
                raise StoreError(f"{self._where}: {key} has {size_bytes} bytes, at most {max_bytes} are accepted")
            try:
                return self._read_body(key, answer["Body"], size_bytes)
            except (botocore.exceptions.BotoCoreError, OSError) as error:
                if attempt == _ATTEMPTS:
                    raise self._explained(f"get {key}", error) from error
                time.sleep(0.1 * 2**attempt)
        raise AssertionError("unreachable")

    def size(self, key: str) -> int | None:
        """Size in bytes; None when there is no such object."""
        try:
            return int(self._call(f"size {key}", self._client.head_object, Key=self._full(key))["ContentLength"])
        except ObjectMissing:
            return None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order."""
        token: dict[str, str] = {}
        while True:
            full = self._prefix + check_prefix(prefix)
            page = self._call(f"list {prefix}", self._client.list_objects_v2, Prefix=full, MaxKeys=_PAGE, **token)
            for item in page.get("Contents", []):
                yield ObjectInfo(item["Key"][len(self._prefix) :], int(item["Size"]))
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there do not matter."""
        fulls = [self._full(key) for key in keys]
        with ThreadPoolExecutor(4, "s3-delete") as pool:
            list(pool.map(lambda full: self._call(f"delete {full}", self._client.delete_object, Key=full), fulls))

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _call(self, what: str, call: Callable[..., T], **arguments: Any) -> T:
        try:
            return call(Bucket=self._bucket, **arguments)
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise self._explained(what, error) from error

    def _read_body(self, key: str, body: Any, size_bytes: int) -> bytes:
        """Read all of a body; a slow drip ends as a timeout although each single read is in time."""
        limit = time.monotonic() + self._timeout_s + size_bytes / _LEAST_RATE
        chunks = []
        with body:
            while chunk := body.read(_CHUNK_BYTES):
                chunks.append(chunk)
                if time.monotonic() > limit:
                    raise TimeoutError(f"{key}: slower than {_LEAST_RATE} bytes a second")
        data = b"".join(chunks)
        if len(data) != size_bytes:
            raise ConnectionError(f"{key}: the body ended after {len(data)} of {size_bytes} bytes")
        return data

    def _explained(self, what: str, error: Exception) -> StoreError:
        """The error in our words. The store's own text is left out: it may repeat what was sent."""
        if not isinstance(error, botocore.exceptions.ClientError):
            return StoreError(f"{self._where}: {what} failed ({type(error).__name__}); {_advice(error)}")
        code, status = str(error.response.get("Error", {}).get("Code", "")), _status(error)
        if code == "NoSuchBucket" or (status == 404 and what.startswith("list")):
            return StoreError(f"{self._where}: there is no such bucket; make it, or set s3.bucket to one that exists")
        if status == 404:
            return ObjectMissing(f"{self._where}: there is no object for: {what}")
        return StoreError(f"{self._where}: {what} was answered with {status} {code}; {_code_advice(code, status)}")


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _config(timeout_s: float) -> botocore.config.Config:
    return botocore.config.Config(
        s3={"addressing_style": "path", "payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        connect_timeout=min(_CONNECT_S, timeout_s),
        read_timeout=timeout_s,
        max_pool_connections=_POOL,
    )


def _status(error: botocore.exceptions.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _advice(error: Exception) -> str:
    if isinstance(error, (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError)):
        return "set OFFSETRL_S3__ACCESS_KEY and OFFSETRL_S3__SECRET_KEY, or the store's usual credentials"
    return "check that the store runs and that s3.endpoint_url is right"


def _code_advice(code: str, status: int) -> str:
    if code == "RequestTimeTooSkewed":
        return "this machine's clock and the store's differ too much: set the clock"
    if status in (401, 403):
        return "check s3.access_key, s3.secret_key and what they may do"
    if status >= 500 or code in ("SlowDown", "Throttling"):
        return "the store is in trouble or busy: it will be tried again"
    return "check the settings in [s3]"
