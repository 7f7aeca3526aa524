"""Tiny models with the float32 logits of transformers, as references for llama.cpp decoders."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from echo_node.engine.llama_decoder import LlamaDecoder
from tests.engine import models


class Model:
    """A folder, its weights, ids, and what transformers says follows each of them in float32."""

    def __init__(self, folder, length):
        self.folder = folder
        self.weights = models.weights(folder)
        self.ids = np.random.default_rng(1).integers(0, models.VOCABULARY, length)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            self.logits = reference(torch.from_numpy(self.ids)[None]).logits[0].numpy()

    def decoder(self, kind="f32", **settings):
        return LlamaDecoder(self.folder, kind=kind, threads=1, **settings)


def gap(logits, wanted):
    assert logits.dtype == np.float32
    return np.abs(logits - wanted).max()


def everything(decoder, ids):
    """The bits of what a decoder says: by prefill, by a copied row, by decoding and by scoring."""
    decoder.make_room(3, 40)
    said = [decoder.prefill([0, 1], [ids[:9], ids[3:20]]).tobytes()]
    decoder.copy(1, 2, 11)
    said += [decoder.decode(ids[place : place + 3]).tobytes() for place in range(5)]
    return [*said, decoder.score(ids, ids.size).tobytes()]
