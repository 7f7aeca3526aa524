"""A tiny random chat model: bytes as tokens, ChatML as its template."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{%- for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chat_model(folder: Path, *, context: int = 256) -> Path:
    """Write the model in bf16, with its tokenizer and template, as `save_pretrained` does."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = tokenizers.Tokenizer(models.BPE({each: at for at, each in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([START, END])
    torch.manual_seed(0)
    end = words.token_to_id(END)
    config = LlamaConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=end - 1,
        eos_token_id=end,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "bos_token": START}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
