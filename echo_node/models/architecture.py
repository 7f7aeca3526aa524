"""Parameters that a model's configuration calls for: names, shapes, tied names.

The model is built on the meta device, without memory for weights. This needs torch and
transformers; code that a model's folder brings is never run.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from echo_node.errors import ConfigError, boundary


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a model by their canonical names, tied ones once."""

    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    """Names of redundant copies, and the parameter that each one repeats."""
    prefix: str
    """Name of the base model, which older files leave out of their names."""

    def canonical_name(self, name: str) -> str:
        """Return the parameter's name in the model, for a name in a file."""
        full = f"{self.prefix}.{name}"
        known = self.shapes.keys() | self.tied.keys()
        return full if name not in known and full in known else name


def can_read_parameters() -> bool:
    return find_spec("torch") is not None and find_spec("transformers") is not None


def read_parameters(folder: Path) -> Parameters:
    """Return the parameters of the model that a folder's config.json describes."""
    import torch  # noqa: PLC0415 - it takes seconds
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    advice = "is it a causal language model that this release of transformers knows?"
    with boundary(ConfigError, f"building the model of {folder / 'config.json'}", advice=advice):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM
            model = make.from_config(config, trust_remote_code=False)
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return Parameters(shapes, tied, model.base_model_prefix)
