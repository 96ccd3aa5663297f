"""What this rank is about to do -> the same on every rank, or a finding before anybody waits for ever.

Told of each module, gather and engine call just before its collectives; ranks compare over a group of their own.
Must never be the one that hangs: who does not come in time is named, with what the others are about to do.
"""

from __future__ import annotations

import datetime
import hashlib
from collections import Counter, deque
from typing import Any

import torch
import torch.distributed as dist

from recipes.shared.audit.findings import Findings
from recipes.shared.audit.origin import Line, line

PATIENCE_S = 600.0  # ranks may differ by an evaluation, or by data that one of them still reads
REMEMBERED = 4096  # events: more than a step of a deep model has


class Order:
    """The sequence of this rank's events. All ranks make one; `patience_s`: how long one may be alone."""

    def __init__(self, findings: Findings, patience_s: float = PATIENCE_S) -> None:
        self.findings, self.patience_s = findings, patience_s
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=patience_s))
        self.store = dist.distributed_c10d._get_default_store()
        self.digest, self.count = b"", 0
        self.past: deque[tuple[str, Line | None]] = deque(maxlen=REMEMBERED)

    def event(self, name: str) -> None:
        """All ranks. Raises UserError, on every rank that is here, when they are about to do different things."""
        if self.world_size == 1:
            return
        self.count += 1
        self.digest = hashlib.blake2b(self.digest + name.encode(), digest_size=8).digest()
        number = int.from_bytes(self.digest[:7], "big")
        both = torch.tensor([number, -number])
        here = line()
        self.past.append((name, here))
        self.store.set(f"zerolaunch/audit/{self.rank}", f"{self.count} {name} at {here}")
        try:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:
            if "timed out" in str(error).lower():  # otherwise a rank was lost, which is another rank's failure
                self._alone(name, here)
            raise
        if both[0] != -both[1]:
            self._differ()

    def exchange(self, value: Any) -> list[Any]:
        """That of every rank. All ranks."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def close(self) -> None:
        """Gives the group up: its thread would wake a hundred times a second. After the last event and exchange."""
        dist.destroy_process_group(self.group)
        self.group = None

    def _differ(self) -> None:
        """Names the first event that ranks do not share, lines included: what differs now may follow from it."""
        pasts = [list(past) for past in self.exchange(self.past)]
        every = next(events for events in zip(*pasts, strict=True) if len(set(events)) > 1)
        often = Counter(every)
        # Who does what fewer ranks do; of two, who stands at the earlier line: the others have gone past it.
        odd = min(every, key=lambda event: (often[event], event[1].line if event[1] else 0))
        parts = [f"{_ranks(every, event)} at {event[0]} ({event[1]})" for event in often]
        self.findings.add("order", odd[0], odd[1], f"is not what every rank does now: {'; '.join(parts)}", fatal=True)

    def _alone(self, name: str, here: Line | None) -> None:
        places = [self._place(rank) for rank in range(self.world_size)]
        late = [rank for rank, (count, _) in enumerate(places) if count < self.count]
        last = "; ".join(f"rank {rank} {places[rank][1]}" for rank in late)
        what = f"is where this rank waits: ranks {late} did not come within {self.patience_s:g} s ({last})"
        self.findings.add("order", name, here, what, fatal=True)

    def _place(self, rank: int) -> tuple[int, str]:
        """How many events a rank has come to, and what is known of where it is."""
        key = f"zerolaunch/audit/{rank}"
        if not self.store.check([key]):
            return 0, "has not begun"
        count, place = self.store.get(key).decode().split(" ", 1)
        return int(count), f"was last seen at {place}"


def _ranks(every: tuple[Any, ...], event: Any) -> str:
    ranks = [rank for rank, other in enumerate(every) if other == event]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
