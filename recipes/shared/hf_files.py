"""The files that make a folder of weights a Hugging Face model: config, generation config, tokenizer.

Used by export.
Must never download anything, or replace a file that is there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from recipes.shared.model import DTYPES, make_config

TOKENIZER_SUFFIXES = (".json", ".model", ".txt", ".jinja")
# JSON files of a model's or a Trainer's folder that are not a tokenizer's.
NOT_TOKENIZER = ("config.json", "generation_config.json", "trainer_state.json", "training_args.json", "export.json")
GENERATION = "generation_config.json"


def write_model_config(fields: dict[str, Any], dtype: str, folder: Path, source: Path | None) -> None:
    """config.json of configuration `fields`, and generation_config.json: `source`'s own, or what the config implies."""
    from transformers import GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = make_config(fields)
    if not config.architectures:
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        config.architectures = [architecture] if architecture else None
    config.dtype = DTYPES[dtype]
    config.save_pretrained(folder)
    if source is not None and (source / GENERATION).is_file():
        shutil.copy2(source / GENERATION, folder / GENERATION)
    else:
        GenerationConfig.from_model_config(config).save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer's files in `source`, as they are."""
    for path in source.iterdir():
        wanted = path.suffix in TOKENIZER_SUFFIXES and path.name not in NOT_TOKENIZER
        if path.is_file() and wanted and ".index." not in path.name and not (folder / path.name).exists():
            shutil.copy2(path, folder / path.name)
