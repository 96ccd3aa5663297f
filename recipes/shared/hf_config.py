"""Fields of a Hugging Face configuration -> its object and its model's class; element types by the names of plans.

Used where models are built, measured and exported.
Must never load DeepSpeed, or transformers before a configuration is asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from launcher.errors import Problem, UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_class(config: Any) -> Any:
    """The library's class that builds and loads a language model of this configuration object.

    An encoder-decoder (T5, BART) reads one sequence and writes another; anything else continues a sequence.
    Raises UserError for a decoder without a first token.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        why = "the decoder of this family begins with that token, and the configuration does not name it"
        fix = "model.config.decoder_start_token_id=0 is T5's; the configuration of given weights names theirs"
        raise UserError(Problem("model.config.decoder_start_token_id", "nothing", why, fix))
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def is_encoder_decoder(fields: dict[str, Any]) -> bool:
    """Whether a model of these configuration fields reads one sequence and writes another."""
    return bool(make_config(fields).is_encoder_decoder)


def make_config(fields: dict[str, Any]) -> Any:
    """Hugging Face configuration object of `fields`; raises UserError for a family the library does not have."""
    from transformers import AutoConfig

    rest = {name: value for name, value in fields.items() if name not in ("model_type", "transformers_version")}
    try:
        return AutoConfig.for_model(fields["model_type"], **rest)
    except (ValueError, TypeError) as error:
        raise UserError(
            Problem(
                "model.config",
                str(fields.get("model_type")),
                f"transformers cannot build this configuration: {str(error).splitlines()[0]}",
                "use a model_type and fields that the installed transformers knows",
            )
        ) from None
