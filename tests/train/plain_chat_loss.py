"""Loss of a folder of weights, with an adapter or without, on arrays in a file: Hugging Face and PEFT alone.

Started as a process of its own: python plain_chat_loss.py FOLDER ADAPTER|- ARRAYS.npz
Must never import anything of this project.
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

folder, adapter, arrays = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
if adapter != "-":
    from peft import PeftModel

    model = PeftModel.from_pretrained(model, adapter)
with torch.no_grad():
    batch = {name: torch.from_numpy(array) for name, array in np.load(arrays).items()}
    print(repr(model.eval()(**batch).loss.item()))
