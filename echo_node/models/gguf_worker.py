"""Program that writes a GGUF file as a Hugging Face folder, for `gguf_convert`.

Weights are dequantised to bf16, one tensor at a time. An error in the file is one line on standard
output.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_node.errors import ConfigError, EchoError, boundary
from echo_node.models.bf16_file import PIECE, is_finite, to_bf16, write_bf16_file
from echo_node.models.folder import WEIGHTS


def unpack(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file.

    A model with a part missing is refused.
    """
    import transformers  # noqa: PLC0415 - so that a wrong call is told at once

    with tempfile.TemporaryDirectory() as alone, boundary(ConfigError, "reading it"):
        Path(alone, "model.gguf").symlink_to(file)  # nothing that lies beside the file is read
        place: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True}
        config = transformers.AutoConfig.from_pretrained(alone, **place)
        tensors = _Tensors(file, config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(alone, **place)
        building = folder.with_name(f"{folder.name}.building")
        building.mkdir(parents=True)
        try:
            config.architectures, config.dtype = [tensors.architecture], "bfloat16"
            config.save_pretrained(building)
            tokenizer.save_pretrained(building)
            write_bf16_file(building / WEIGHTS, tensors.shapes, tensors.pieces)
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)


class _Tensors:
    """Tensors of a GGUF file under the model's own names, dequantised one at a time."""

    def __init__(self, file: Path, config: Any) -> None:
        import gguf  # noqa: PLC0415 - as above
        import torch  # noqa: PLC0415
        import transformers  # noqa: PLC0415
        from transformers import modeling_gguf_pytorch_utils  # noqa: PLC0415

        mapping: Any = modeling_gguf_pytorch_utils  # which ships no types
        models: Any = transformers.AutoModelForCausalLM

        with torch.device("meta"):
            model = models.from_config(config)
        self.architecture = type(model).__name__
        self.shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        reader = gguf.GGUFReader(str(file))
        self._parsed: Any = mapping.load_gguf_checkpoint(str(file), return_tensors=False)
        family = mapping.read_field(reader, "general.architecture")[0]
        make = mapping.TENSOR_PROCESSORS.get(family, mapping.TensorProcessor)
        self._processor: Any = make(config=self._parsed["config"])
        names = mapping.get_gguf_hf_weights_map(model, self._processor)
        self._read = gguf.dequantize
        self._stored = {
            names[each.name]: each for each in reader.tensors if names.get(each.name) in self.shapes
        }
        if missing := sorted(self.shapes.keys() - self._stored.keys()):
            raise ConfigError(f"the weights {missing[0]} are missing in it")

    def pieces(self, name: str) -> Iterator[NDArray[np.uint16]]:
        """Yield the bf16 bit patterns of one tensor."""
        stored = self._stored[name]
        values = self._processor.process(
            weights=self._read(stored.data, stored.tensor_type),
            name=stored.name,
            tensor_key_mapping={},
            parsed_parameters=self._parsed,
        ).weights
        if tuple(values.shape) != self.shapes[name]:
            raise ConfigError(f"the weights {name} have the shape {values.shape}, not {self.shapes[name]}")
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        for start in range(0, flat.size, PIECE):
            bits = to_bf16(flat[start : start + PIECE])
            if not is_finite(bits):
                raise ConfigError(f"the weights {name} are not finite")
            yield bits


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
