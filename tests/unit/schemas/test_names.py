"""Names: what may stand in topics and keys, and that nothing leads out of them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.errors import SettingError
from schemas.names import (
    KINDS,
    blob_key,
    check_name,
    commit_group,
    control_topic,
    manifest_key,
    manifests_prefix,
    nearest,
    parse_manifest_key,
    schemas_topic,
    topic,
)

NAMES = st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True)
BAD = ["", "-a", "A", "a.b", "a/b", "..", "a_b", "a b", "ä", "a\n", "a\x00", "%2e", "a" * 64, "a" * 1100, "١"]


@given(NAMES)
def test_good_names_are_given_back(name: str) -> None:
    assert check_name("policy", name) == name


@pytest.mark.parametrize("name", BAD)
def test_bad_names_are_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(SettingError, match="is not allowed: use 1 to 63 of") as caught:
        check_name("policy", name)
    assert repr(name) in str(caught.value)
    makers: list[Callable[[], str]] = [
        lambda: topic("demo", name, "samples"),
        lambda: topic(name, "main", "samples"),
        lambda: control_topic(name),
        lambda: schemas_topic(name),
        lambda: manifest_key("demo", name, 1, 1),
        lambda: commit_group("demo", "main", name),
        lambda: blob_key(name, "main", "0" * 64),
    ]
    for make in makers:
        with pytest.raises(SettingError):
            make()


@given(st.text())
@example("../x")
@example("a\u2024b")
def test_any_text_is_refused_or_stays_one_part_of_a_key(name: str) -> None:
    try:
        key = blob_key("demo", name, "ab" * 32)
    except SettingError:
        return
    assert re.fullmatch(r"demo/[a-z0-9-]+/blobs/[0-9a-f]{64}", key)
    assert key.count("/") == 3


@given(NAMES, NAMES, NAMES, NAMES)
def test_two_policies_never_share_a_topic(run: str, policy: str, other_run: str, other_policy: str) -> None:
    if (run, policy) != (other_run, other_policy):
        mine = {topic(run, policy, kind) for kind in KINDS}
        assert mine.isdisjoint(topic(other_run, other_policy, kind) for kind in KINDS)
    assert control_topic(run) not in {topic(other_run, other_policy, kind) for kind in KINDS}


def test_a_topic_of_another_kind_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        topic("demo", "main", "sample")


@pytest.mark.parametrize("digest", ["", "ab", "AB" * 32, "../" + "ab" * 31, "g" * 64, "ab" * 32 + "\n"])
def test_a_blob_is_named_by_a_digest_only(digest: str) -> None:
    with pytest.raises(SettingError, match="SHA-256"):
        blob_key("demo", "main", digest)


@given(NAMES, NAMES, st.integers(0, 10**9), st.integers(0, 10**11))
def test_manifest_keys_are_parsed_back(run: str, policy: str, epoch: int, version: int) -> None:
    key = manifest_key(run, policy, epoch, version)
    assert key.startswith(manifests_prefix(run, policy))
    assert parse_manifest_key(key) == (epoch, version)


@pytest.mark.parametrize(
    "key",
    ["", "demo/main/manifests/2.json", "demo/main/manifests/-1-2.json", "demo/main/manifests/1-2.json.tmp", "1-2.json"],
)
def test_other_keys_are_no_manifests(key: str) -> None:
    assert parse_manifest_key(key) is None


def test_the_nearest_name_is_offered() -> None:
    assert nearest("epochs", ["epoch", "step"]).startswith("did you mean 'epoch'?")
    assert nearest("zzz", ["epoch", "step"]) == "known: epoch, step"
