"""LoRA folders of the embedded model, and the same adapters in PEFT."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from echo_node.models import embedded
from echo_node.models.adapter import (
    PEFT_SETTINGS,
    PEFT_WEIGHTS,
    SETTINGS,
    WEIGHTS,
    AdapterSettings,
    all_linear,
    base_shapes,
)
from echo_node.runs.adapter_folder import make_adapter_folder


def lora_folder(to: Path, *, rank: int = 4, alpha: float = 8.0, targets=(), moved: float = 0.0) -> Path:
    """A folder with the embedded model as base; with `moved`, B is not zero."""
    base = embedded.folder()
    settings = AdapterSettings(rank, alpha, tuple(sorted(targets)) or all_linear(base_shapes(base)))
    folder = make_adapter_folder(base, to, settings, b"tests")
    if moved:
        draws = torch.Generator().manual_seed(5)
        tensors = load_file(folder / WEIGHTS)
        for name in sorted(tensors):
            if "lora_B" in name:
                drawn = moved * torch.randn(tensors[name].shape, generator=draws)
                tensors[name] = drawn.bfloat16()
        save_file(tensors, folder / WEIGHTS)
    return folder


def peft_model(folder: Path):
    """The folder's model as PEFT opens it, in float32."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(embedded.folder(), dtype=torch.float32)
    with tempfile.TemporaryDirectory() as place:
        shutil.copyfile(folder / SETTINGS, Path(place, PEFT_SETTINGS))
        shutil.copyfile(folder / WEIGHTS, Path(place, PEFT_WEIGHTS))
        return PeftModel.from_pretrained(base, place).eval()


@torch.no_grad()
def log_probs(model, prompt, ids, temperature: float = 1.0):
    """The log-probability of each id after a prompt."""
    whole = torch.tensor([[*map(int, prompt), *map(int, ids)]])
    logits = model(whole).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, dim=-1)[range(len(ids)), np.asarray(ids)].numpy()


@functools.cache
def moved_folder() -> Path:
    """One folder for many tests: nobody writes to it."""
    return lora_folder(Path(tempfile.mkdtemp(prefix="echo-lora-")) / "model", moved=0.05)
