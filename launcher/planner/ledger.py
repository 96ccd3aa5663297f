"""Running account of a rank's memory by term, with the highest point of every moment.

Kept by the planner's engines while they walk through a run's first steps.
Must never know what a term means.
"""

from __future__ import annotations

from launcher.planner.prediction import MOMENTS, Moment


class Places:
    """Accounts of a rank's device, host and NVMe. On a CPU, `one_memory`, the device is the host."""

    def __init__(self, one_memory: bool) -> None:
        self.device, self.disk = Ledger(), Ledger()
        self.host = self.device if one_memory else Ledger()

    def home(self, offload: str | None) -> Ledger:
        """Where what is offloaded to none, cpu or nvme lies."""
        return {None: self.device, "cpu": self.host, "nvme": self.disk}[offload]


class Ledger:
    """Bytes by term, now; and at the highest point of each moment."""

    def __init__(self) -> None:
        self.terms: dict[str, int] = {}
        self.total = 0
        self.moment = MOMENTS[0]
        self.highest: dict[str, tuple[int, dict[str, int]]] = {}

    def add(self, term: str, size: int) -> None:
        """`size` bytes more of `term`; negative: fewer."""
        if not size:
            return  # most events change nothing
        self.terms[term] = self.terms.get(term, 0) + size
        self.total += size
        if size > 0:
            self._look()

    def set(self, term: str, size: int) -> None:
        """`term` has `size` bytes now."""
        self.add(term, size - self.terms.get(term, 0))

    def spike(self, term: str, size: int) -> None:
        """`size` bytes of `term` that are gone at once."""
        self.add(term, size)
        self.add(term, -size)

    def begin(self, moment: str) -> None:
        """What follows is part of `moment`."""
        self.moment = moment
        self._look()

    def moments(self) -> tuple[Moment, ...]:
        """The highest point of each moment."""
        return tuple(
            Moment(name, {term: size for term, size in self.highest[name][1].items() if size})
            for name in MOMENTS
            if name in self.highest
        )

    def peak(self) -> dict[str, int]:
        """Terms at the highest point of all moments."""
        _, terms = max(self.highest.values(), key=lambda point: point[0], default=(0, {}))
        return {term: size for term, size in terms.items() if size}

    def _look(self) -> None:
        if self.moment not in self.highest or self.total > self.highest[self.moment][0]:
            self.highest[self.moment] = (self.total, dict(self.terms))
