"""One suite for every object store; and what only the real one can get wrong."""

from __future__ import annotations

import http.server
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra import s3_store as s3_module
from infra.memory_store import MemoryStore
from infra.s3_store import S3Store
from infra.store import ObjectInfo, ObjectStore, check_key, check_prefix
from schemas.errors import ObjectMissing, SettingError, StoreError

_NUMBERS = itertools.count()
BAD_KEYS = ["", "/abs", "../up", "a/../../b", "a//b", "a/", ".", "a/./b", "a\0b", "a\x01b", "a\\b", "x" * 1100]


def s3_store(endpoint: Any, **other: Any) -> S3Store:
    settings = {
        "endpoint_url": endpoint.url,
        "bucket": endpoint.bucket,
        "prefix": f"contract-{os.getpid()}-{next(_NUMBERS)}",
        "region_name": "us-east-1",
        "access_key": endpoint.access_key,
        "secret_key": endpoint.secret_key,
        "timeout_s": 20.0,
    }
    return S3Store(**(settings | other))


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    made = s3_store(request.getfixturevalue("s3_endpoint"))
    yield made
    made.close()


def test_what_was_put_is_got_back_whole(store: ObjectStore) -> None:
    for data in (b"", b"x", bytes(range(256)) * 5000):
        assert store.put("run/policy/blob", data)
        assert store.get("run/policy/blob") == data
        assert store.size("run/policy/blob") == len(data)


def test_a_missing_object_has_no_size_and_cannot_be_read(store: ObjectStore) -> None:
    assert store.size("nothing/here") is None
    with pytest.raises(ObjectMissing, match="nothing/here"):
        store.get("nothing/here")


def test_max_bytes_is_a_limit_on_what_is_read(store: ObjectStore) -> None:
    store.put("big", b"x" * 1000)
    assert len(store.get("big", max_bytes=1000)) == 1000
    with pytest.raises(StoreError, match="big has 1000 bytes, at most 999"):
        store.get("big", max_bytes=999)


def test_if_absent_keeps_what_was_there(store: ObjectStore) -> None:
    assert store.put("manifests/1-0.json", b"first", if_absent=True) is True
    assert store.put("manifests/1-0.json", b"second", if_absent=True) is False
    assert store.get("manifests/1-0.json") == b"first"
    assert store.put("manifests/1-0.json", b"third") is True
    assert store.get("manifests/1-0.json") == b"third"


def test_listing_is_in_key_order_and_cut_by_prefix(store: ObjectStore) -> None:
    keys = ["a/b", "a/b/c", "a-b", "a/b-1", "a.b", "a/10-2.json", "a/9-1.json", "b/x", "aa"]
    for key in keys:
        if key != "a/b":  # a store on a file system cannot hold both an object and a folder of one name
            store.put(key, key.encode())
    keys.remove("a/b")
    assert [info.key for info in store.list("")] == sorted(keys)
    assert [info.key for info in store.list("a/")] == sorted(key for key in keys if key.startswith("a/"))
    assert [info.key for info in store.list("a")] == sorted(key for key in keys if key.startswith("a"))
    assert list(store.list("a/1")) == [ObjectInfo("a/10-2.json", 11)]
    assert list(store.list("zzz/")) == []


@pytest.mark.s3
def test_a_long_listing_has_several_pages(s3_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module, "_PAGE", 7)
    store = s3_store(s3_endpoint)
    keys = [f"many/{number:02}" for number in range(21)]
    for key in keys:
        store.put(key, b"")
    assert [info.key for info in store.list("many/")] == keys
    store.delete(keys)
    assert list(store.list("")) == []


def test_deleting_is_for_good_and_does_not_mind_what_is_gone(store: ObjectStore) -> None:
    for key in ("a/1", "a/2", "a/3"):
        store.put(key, b"x")
    store.delete(["a/1", "a/3", "a/never"])
    store.delete([])
    assert [info.key for info in store.list("a/")] == ["a/2"]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_that_might_lead_elsewhere_is_refused(store: ObjectStore, key: str) -> None:
    for call in (
        lambda: store.put(key, b""),
        lambda: store.get(key),
        lambda: store.size(key),
        lambda: store.delete([key]),
    ):
        with pytest.raises(SettingError, match="is not allowed"):
            call()


@settings(deadline=None)
@given(st.text(max_size=40))
def test_a_checked_key_stays_below_its_folder(key: str) -> None:
    try:
        check_key(key)
    except SettingError:
        return
    path = os.path.normpath("/base/" + key)
    assert path.startswith("/base/") and path == "/base/" + key
    assert check_prefix(key) == key


def test_writers_at_once_leave_one_whole_object(store: ObjectStore) -> None:
    bodies = [bytes([number]) * 200_000 for number in range(8)]
    threads = [threading.Thread(target=store.put, args=("race", body)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get("race") in bodies


def test_the_knobs_of_the_fake() -> None:
    store = MemoryStore()
    store.put("a", bytes(10))
    store.flip("a", 13)
    assert store.get("a") == bytes([0, 32]) + bytes(8)
    store.truncate("a", 4)
    assert store.size("a") == 4
    store.fail_next(2, after=1)
    assert store.size("a") == 4
    for _ in range(2):
        with pytest.raises(StoreError, match="told to fail"):
            store.get("a")
    assert len(store.get("a")) == 4


@pytest.mark.s3
def test_a_prefix_hides_everything_outside_it(s3_endpoint: Any) -> None:
    one, other = s3_store(s3_endpoint, prefix="contract-one"), s3_store(s3_endpoint, prefix="/contract-one/inner/")
    other.put("key", b"inner")
    assert one.get("inner/key") == b"inner"
    assert [info.key for info in other.list("")] == ["key"]
    with pytest.raises(SettingError):
        s3_store(s3_endpoint, prefix="a/../b")


@pytest.mark.s3
def test_what_is_damaged_on_the_way_up_is_refused(s3_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = s3_store(s3_endpoint)
    true = s3_module._md5
    monkeypatch.setattr(s3_module, "_md5", lambda data: true(data + b"what was lost"))
    with pytest.raises(StoreError, match="put key was answered with 400 BadDigest"):
        store.put("key", b"data")
    assert store.size("key") is None


@pytest.mark.s3
def test_check_passes_on_an_empty_prefix(s3_endpoint: Any) -> None:
    s3_store(s3_endpoint).check()


@pytest.mark.s3
def test_a_missing_bucket_is_named(s3_endpoint: Any) -> None:
    store = s3_store(s3_endpoint, bucket="not-a-bucket-of-ours")
    with pytest.raises(StoreError, match="'not-a-bucket-of-ours': there is no such bucket; make it"):
        store.check()
    with pytest.raises(StoreError, match="not-a-bucket-of-ours"):
        store.put("a", b"x")


@pytest.mark.s3
def test_a_wrong_secret_is_refused_and_never_shown(s3_endpoint: Any) -> None:
    store = s3_store(s3_endpoint, secret_key="canary-secret-value")
    with pytest.raises(StoreError, match=r"check s3\.access_key") as caught:
        store.check()
    assert "canary" not in str(caught.value) + repr(store)
    assert s3_endpoint.secret_key not in str(caught.value) + repr(store)


class _Stub(http.server.BaseHTTPRequestHandler):
    """A store that does one thing wrong at a time."""

    protocol_version = "HTTP/1.1"  # answers `Expect: 100-continue`, for which the client waits a second
    body = os.urandom(300_000)
    modes: ClassVar[list[str]] = []
    """What to do with the next requests; all is well when none is left."""
    seen: ClassVar[list[tuple[str, dict[str, str]]]] = []

    def log_message(self, *arguments: Any) -> None:
        pass

    def _handle(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.seen.append((self.command, headers))
        mode = self.modes.pop(0) if self.modes else "ok"
        if any(name.startswith(("x-amz-checksum", "x-amz-trailer", "x-amz-sdk-checksum")) for name in headers):
            mode = "501"
        if mode.isdigit():
            self._answer(int(mode), b"<Error><Code>Trouble</Code><Message>canary-message</Message></Error>")
        elif mode == "close":
            self.close_connection = True
        else:
            self._answer(200, b"" if self.command in ("PUT", "DELETE") else self.body, cut=mode == "short")
        assert sent is not None

    def _answer(self, status: int, body: bytes, cut: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle


@pytest.fixture
def stub() -> Iterator[S3Store]:
    _Stub.modes.clear()
    _Stub.seen.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Stub)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    made = S3Store(
        endpoint_url=url, bucket="b", prefix="", region_name="r", access_key="a", secret_key="s", timeout_s=3.0
    )  # fmt: skip
    yield made
    made.close()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("modes", [["500", "503"], ["close"], ["short"], ["short", "short"], ["close", "short"]])
def test_a_passing_fault_is_not_noticed(stub: S3Store, modes: list[str]) -> None:
    _Stub.modes[:] = modes
    assert stub.get("key") == _Stub.body
    assert not _Stub.modes


@pytest.mark.parametrize("mode", ["500", "close", "short"])
def test_a_lasting_fault_ends_in_an_error_that_names_the_place(stub: S3Store, mode: str) -> None:
    _Stub.modes[:] = [mode] * 50
    with pytest.raises(StoreError, match=r"object store http://127.0.0.1:\d+, bucket 'b': get key") as caught:
        stub.get("key")
    assert "canary" not in str(caught.value)
    assert len(_Stub.seen) <= 9


def test_nothing_that_plain_stores_refuse_is_sent(stub: S3Store) -> None:
    """Newer boto3 adds checksum headers and trailers, to batch deletes in any case; the stub answers 501 to them."""
    stub.put("key", b"data")
    stub.put("key", b"data", if_absent=True)
    stub.delete(["key", "other"])
    stub.size("key")
    assert [command for command, _ in _Stub.seen] == ["PUT", "PUT", "DELETE", "DELETE", "HEAD"]
    assert all("content-md5" in headers for command, headers in _Stub.seen if command == "PUT")
    payloads = {headers["x-amz-content-sha256"] for command, headers in _Stub.seen if command == "PUT"}
    assert payloads == {"UNSIGNED-PAYLOAD"}
    assert all("content-md5;" in headers["authorization"] for command, headers in _Stub.seen if command == "PUT")


def test_a_store_without_conditional_puts_is_asked_first(stub: S3Store) -> None:
    _Stub.modes[:] = ["501", "404"]
    assert stub.put("key", b"data", if_absent=True) is True
    assert [command for command, _ in _Stub.seen] == ["PUT", "HEAD", "PUT"]
    _Stub.modes[:] = ["501", "ok"]
    assert stub.put("key", b"data", if_absent=True) is False


def test_nobody_listening_is_an_error_within_seconds() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = S3Store(
        endpoint_url=f"http://127.0.0.1:{port}", bucket="weights", prefix="p", region_name="r", access_key="canary-key",
        secret_key="canary-secret", timeout_s=5.0,
    )  # fmt: skip
    with pytest.raises(StoreError, match=rf"http://127.0.0.1:{port}, bucket 'weights': list failed") as caught:
        store.check()
    assert "canary" not in str(caught.value)
    store.close()


def test_a_store_that_never_answers_ends_in_an_error() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(50)
        store = S3Store(
            endpoint_url=f"http://127.0.0.1:{mute.getsockname()[1]}", bucket="b", prefix="", region_name="r",
            access_key="a", secret_key="s", timeout_s=0.3,
        )  # fmt: skip
        with pytest.raises(StoreError, match=r"list failed \(ReadTimeoutError\)"):
            store.check()
        store.close()


def test_a_password_in_the_url_is_refused() -> None:
    with pytest.raises(SettingError, match="give them as") as caught:
        S3Store(
            endpoint_url="http://user:canary@host", bucket="b", prefix="", region_name="r", access_key=None,
            secret_key=None, timeout_s=1.0,
        )  # fmt: skip
    assert "canary" not in str(caught.value)
