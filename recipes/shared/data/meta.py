"""Makes the description of one prepared corpus, DataMeta, from or to meta.json in its cache folder.

Called by the builders (write) and by `corpus.open_corpus` (read).
Must never hold anything that depends on the run: the same folder serves every sequence length and seed.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

META_FILE = "meta.json"
WINDOWS, CONVERSATIONS = "windows", "conversations"


@dataclass(frozen=True)
class DataMeta:
    """What meta.json in the cache folder holds."""

    vocab_size: int  # ids are < vocab_size
    train_tokens: int
    validation_tokens: int
    unigram_entropy: float  # nats per token of the training tokens' unigram distribution
    source: str  # a sentence for humans: what it was built from
    tokenizer: str | None  # folder of the Hugging Face tokenizer, None for bytes
    digest: str  # hash of the tokens of both splits: two hosts or two runs with the same digest read the same data
    dtype: str = "uint16"  # of one token on disk, little-endian
    train_file: str = "train.bin"  # relative to the cache folder, or absolute for files used in place
    validation_file: str = "validation.bin"
    validation_start: int = 0  # in tokens: where validation begins when it is the tail of the training file
    layout: str = WINDOWS  # or CONVERSATIONS, each a sample of its own length
    train_samples: int = 0  # conversations, as the next ones
    validation_samples: int = 0
    pad: int = 0  # id that fills up what conversations leave of a row
    ends: list[int] = field(default_factory=list)  # ids that end a response


def read_meta(folder: Path) -> DataMeta:
    """Reads <folder>/meta.json. Raises FileNotFoundError when nothing was prepared there."""
    return DataMeta(**json.loads((folder / META_FILE).read_text(encoding="utf-8")))


def write_meta(folder: Path, meta: DataMeta) -> None:
    """Writes <folder>/meta.json."""
    text = json.dumps(dataclasses.asdict(meta), indent=2, ensure_ascii=False)
    (folder / META_FILE).write_text(text + "\n", encoding="utf-8")
