"""Request -> predicted memory of a rank, moment by moment.

Called when a plan is built. Pure: the profile of the model, where there is one, was measured before.
Must never load torch.
"""

from __future__ import annotations

from launcher.planner.memory import ModelState
from launcher.planner.prediction import Memory, Moment


def memory_of(state: ModelState, bucket_bytes: int) -> Memory:
    """Moments of a step, without activations."""
    init = {name: size for name, size in state.device.items() if name != "moments"}
    backward = state.device | ({"reduce buckets": bucket_bytes} if bucket_bytes else {})
    moments = (Moment("init", init), Moment("forward", state.device), Moment("backward", backward))
    return Memory((*moments, Moment("step", state.device)), state.host, {}, measured=False)
