"""The files that make a folder of weights a Hugging Face model: config, generation config, tokenizer.

Described when a checkpoint is saved, by the library that built the model; written by export, which then needs no more
of it than JSON.
Must never download anything, or replace a file that is there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from recipes.shared.adapter_export import base_of

CONFIG, GENERATION = "config.json", "generation_config.json"
TEMPLATE = "chat_template.jinja"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOKENIZER_SUFFIXES = (".json", ".model", ".txt", ".jinja")
# JSON files of a model's or a Trainer's folder that are not a tokenizer's.
NOT_TOKENIZER = (CONFIG, GENERATION, "trainer_state.json", "training_args.json", "export.json")


def describe(model: Any) -> dict[str, Any] | None:
    """{CONFIG, GENERATION: contents} as save_pretrained would write them; None for a model of another library.

    Of a model with an adapter: those of the model it was put into.
    """
    model = base_of(model)
    if not hasattr(getattr(model, "config", None), "to_diff_dict"):
        return None
    generation = getattr(model, "generation_config", None)
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    config.pop("use_cache", None)  # training turned it off; whoever generates wants it
    return {CONFIG: config, GENERATION: json.loads(generation.to_json_string()) if generation is not None else None}


def described_in(folder: Path) -> dict[str, Any]:
    """The same of a folder that has the files."""
    generation = folder / GENERATION
    return {
        CONFIG: json.loads((folder / CONFIG).read_text(encoding="utf-8")),
        GENERATION: json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else None,
    }


def write_model_config(described: dict[str, Any], dtype: str, folder: Path) -> None:
    """Both files, the first with the element type that the weights are written in."""
    config = {name: value for name, value in described[CONFIG].items() if name not in ("dtype", "torch_dtype")}
    contents = {CONFIG: config | {"dtype": DTYPES[dtype]}, GENERATION: described[GENERATION]}
    for name, content in contents.items():
        if content is not None:
            text = json.dumps(content, indent=2, sort_keys=True)
            (folder / name).write_text(text + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer's files in `source`, as they are."""
    for path in source.iterdir():
        wanted = path.suffix in TOKENIZER_SUFFIXES and path.name not in NOT_TOKENIZER
        if path.is_file() and wanted and ".index." not in path.name and not (folder / path.name).exists():
            shutil.copy2(path, folder / path.name)
