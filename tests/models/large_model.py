"""Random Qwen2 models of any size in a folder, and the peak of a program's own memory."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil

from echo_node.models import embedded
from echo_node.models.bf16_file import PIECE, write_bf16_file

QWEN2_1_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 2,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def write_qwen2(folder: Path, config: dict) -> Path:
    """Write a random model, with the tokenizer of the embedded one, a piece at a time."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for part, rows in (("q", width), ("k", keys), ("v", keys)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = (rows, width)
            shapes[f"{at}self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{at}self_attn.o_proj.weight"] = (width, width)
        shapes |= {f"{at}mlp.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (width, inner)
        shapes |= {f"{at}{part}.weight": (width,) for part in ("input_layernorm", "post_attention_layernorm")}
    noise = (np.random.default_rng(0).normal(0, 0.02, PIECE).astype(np.float32).view(np.uint32) >> 16).astype(
        "<u2"
    )

    def pieces(name):
        left = math.prod(shapes[name])
        while left:
            yield noise[: min(left, PIECE)]
            left -= min(left, PIECE)

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.folder() / name, folder / name)
    write_bf16_file(folder / "model.safetensors", shapes, pieces)
    return folder


def peak_own_memory(command: list[str], **how) -> tuple[int, float, subprocess.CompletedProcess]:
    """Run a program; return its peak of memory without mapped files, in bytes, and its seconds."""
    peak, start = 0, time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how
    ) as child:
        watched = psutil.Process(child.pid)
        while child.poll() is None:
            peak = max(peak, own_memory(watched))
            time.sleep(0.02)
        output = child.stdout.read()
    return peak, time.monotonic() - start, subprocess.CompletedProcess(command, child.returncode, output)


def own_memory(process: psutil.Process) -> int:
    """Anonymous memory of a process and its children, in bytes."""
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    return sum(_anonymous(each.pid) for each in family)


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
