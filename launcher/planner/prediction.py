"""What a plan predicts of memory: each moment of a step, term by term, on the device, the host and the disk.

Made by `launcher.planner.assess`; shown, compared and judged by the rest of the launcher.
Must never hold a formula.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOMENTS = ("init", "forward", "backward", "step")


@dataclass(frozen=True)
class Moment:
    """One moment of a step at its highest point: bytes of a rank on its device, by term."""

    name: str
    """One of MOMENTS: the engine is built, a micro-batch goes forward and backward, the optimizer steps."""
    terms: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """All terms together."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most. On a CPU the device is the host: both are in one memory."""

    moments: tuple[Moment, ...]
    """In the order of a run's first step."""
    host: dict[str, int]
    """Terms of a rank in host memory at their highest point."""
    disk: dict[str, int]
    """Terms of a rank on its NVMe."""
    measured: bool
    """Whether activations are those of the real model at this batch; if not they are left out."""
    resident: dict[str, int] = field(default_factory=dict)
    """Terms that a rank holds between steps, in memory of its device and its host together."""

    @property
    def peak(self) -> Moment:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: moment.total_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory of a rank beside its device's."""
        return sum(self.host.values())
