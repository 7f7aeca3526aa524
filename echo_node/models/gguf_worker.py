"""Program that writes a GGUF file as a Hugging Face folder, for `gguf_convert`.

Weights are dequantised to bf16. An error in the file is one line on standard output.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from echo_node.errors import ConfigError, EchoError, boundary


def unpack(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file. A model with a part missing is none."""
    import torch  # noqa: PLC0415 - so that a wrong call fails at once
    import transformers  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as alone, boundary(ConfigError, "reading it"):
        Path(alone, "model.gguf").symlink_to(file)  # nothing that lies beside the file is read
        place: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True}
        config = transformers.AutoConfig.from_pretrained(alone, **place)
        packed = getattr(transformers, "GgufConfig", None)  # older ones never keep weights packed
        how = {} if packed is None else {"quantization_config": packed(dequantize=True)}
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            alone, config=config, dtype=torch.bfloat16, output_loading_info=True, **place, **how
        )
        model, loading = loaded
        if loading["missing_keys"]:
            raise ConfigError(f"the weights {min(loading['missing_keys'])} are missing in it")
        for name, weight in model.named_parameters():
            if not torch.isfinite(weight).all():
                raise ConfigError(f"the weights {name} are not finite")
        tokenizer = transformers.AutoTokenizer.from_pretrained(alone, **place)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def main() -> None:
    """Run `gguf_worker FILE FOLDER`."""
    file, folder = sys.argv[1:]
    try:
        unpack(Path(file), Path(folder))
    except EchoError as error:
        sys.stdout.write(f"{error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
