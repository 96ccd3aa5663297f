"""Whether training reached every layer of a LoRA adapter: read off the last checkpoint when a run has ended.

Called by recipes on every rank.
Must never take the loss's word for it.
"""

from __future__ import annotations

from launcher.errors import EXIT_TRAINING, Problem, UserError
from recipes.shared.adapter_export import NAME, PREFIX
from recipes.shared.checkpoint.reader import open_checkpoint
from recipes.shared.lora import LISTED
from recipes.shared.state import TrainState


def trained_targets(state: TrainState, moved: bool) -> dict[str, int] | None:
    """{"targets": adapted layers} of a run that has ended; None where there is no adapter. Reads the last checkpoint.

    Raises UserError on rank 0, by name, when B of a layer is still zero though a step was taken with a learning rate
    above 0 (`moved`): the loss may have fallen all the same, with an empty adapter (huggingface/peft#1402).
    """
    if not hasattr(state.engine.module, "peft_config"):
        return None
    targets = state.engine.module.base_model.targeted_module_names
    if not state.ranks.is_main or not moved or state.saved_step is None:
        return {"targets": len(targets)}
    entries = open_checkpoint(state.run.checkpoint(state.saved_step))
    trained = {e.name for e in entries if f".lora_B.{NAME}." in e.name and bool(e.read().any())}
    zero = [name for name in targets if f"{PREFIX}{name}.lora_B.{NAME}.weight" not in trained]
    if zero:
        got = f"{', '.join(zero[:LISTED])}{' ...' * (len(zero) > LISTED)}: {len(zero)} of {len(targets)}"
        why = "after training the adapter of these layers is still zero: no gradient reached it, or none that counts"
        fix = "use other layers, or report it with the run's plan.json; the checkpoint is there"
        raise UserError(Problem("peft.target", got, why, fix), code=EXIT_TRAINING)
    return {"targets": len(targets)}
