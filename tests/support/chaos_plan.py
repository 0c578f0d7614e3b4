"""What the chaos test's producer sends: seeded groups with lost members, second attempts, repeats, late ones, poison."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from schemas.codec import encode
from schemas.records import Close, Status, Trajectory
from support.samples import close, request, trajectory

GROUP_SIZE = 4
LIFETIME_MS = 3_600_000


@dataclass(frozen=True)
class Item:
    """One send."""

    policy: str
    partition: int
    key: bytes | None
    value: bytes | None
    is_poison: bool = False


def make_plan(
    seed: int, run: str, policies: list[str], *, num_trajectories: int, num_partitions: int, now_ms: int
) -> list[Item]:
    """The sends in their order; the same arguments give the same plan."""
    rng = random.Random(f"chaos/{seed}")
    timed: list[tuple[float, int, Item]] = []
    num_groups = num_trajectories // GROUP_SIZE
    patience = min(80, num_groups // 10)
    for n in range(num_groups):
        policy, partition = policies[n % len(policies)], rng.randrange(num_partitions)
        base = trajectory(
            run=run, policy=policy, group=f"g{n:08d}", group_size=GROUP_SIZE, partition=partition, item=n,
            first_request_time_ms=now_ms, lifetime_ms=LIFETIME_MS,
        )  # fmt: skip
        for place, item in _group(rng, base, n, patience):
            timed.append((place, len(timed), item))
    return [item for _, _, item in sorted(timed, key=lambda entry: entry[:2])]


def _group(rng: random.Random, base: Trajectory, n: int, patience: int) -> list[tuple[float, Item]]:
    """Sends of one group, each with where it stands in the order; groups overlap. `patience`: until it is closed."""
    found: list[tuple[float, Item]] = []
    key = base.group.encode()

    def add(after: float, value: bytes | None, is_poison: bool = False) -> None:
        place = n + rng.expovariate(1 / after)
        item = Item(base.policy, base.partition, key, value, is_poison)
        found.append((place, item))
        if rng.random() < 0.02:  # a producer that was not answered sends again
            found.append((place + rng.expovariate(1 / 4), item))

    lost_members = False
    for index in range(base.group_size):
        failed = rng.random() < 0.05
        changes = {"status": Status.TIMEOUT, "reward": None} if failed else {"reward": round(rng.random(), 3)}
        member = replace(base, index=index, seed=rng.getrandbits(32), **changes)
        chance = rng.random()
        if chance < 0.05:
            lost_members = True
        elif chance < 0.07:  # too late by itself
            lost_members = True
            add(patience / 4, encode(replace(member, first_request_time_ms=1, lifetime_ms=1)))
        else:
            add(patience / 4, encode(member))
        if rng.random() < 0.04:
            add(12, encode(replace(member, attempt=1, reward=0.5, status=Status.OK)))
    if rng.random() < 0.05:  # a close record that comes before any member closes nothing
        found.append((n - 1.0, Item(base.policy, base.partition, key, encode(_close(base)))))
    if lost_members or rng.random() < 0.05:
        found.append((n + float(patience), Item(base.policy, base.partition, key, encode(_close(base)))))
    if rng.random() < 0.12:
        add(patience / 4, rng.choice(_poison(base)), is_poison=True)
    return found


def _close(base: Trajectory) -> Close:
    return close(run=base.run, policy=base.policy, group=base.group, partition=base.partition)


def _poison(base: Trajectory) -> list[bytes | None]:
    """One of each kind of unreadable record that a producer can send."""
    return [
        b"\x00\xff",
        b"",
        None,
        b"\xc3\x01" + bytes(8) + b"x",
        encode(base)[:-3],
        encode(base) + b"more",
        encode(request(run=base.run, policy=base.policy, partition=base.partition)),
        encode(replace(base, partition=base.partition + 100)),
        encode(replace(base, policy="stranger")),
        encode(replace(base, index=base.group_size)),
        encode(replace(base, status=Status.UNKNOWN, reward=None)),
    ]
