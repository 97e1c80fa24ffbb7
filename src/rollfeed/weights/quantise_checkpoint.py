"""Makes a checkpoint in FP8 of another one, for servers: ``python -m rollfeed.weights.quantise_checkpoint``.

Matrices of linear layers become FP8; embeddings, the output head, routers of experts and all that is no matrix stay as
they are, which is what servers expect.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from rollfeed.base.atomic import replace_folder
from rollfeed.errors import CheckpointError
from rollfeed.model_files import CONFIG_FILE, TensorHeader, find_config, headers_by_file, read_config
from rollfeed.weights.serving.fp8 import Block, quantise
from rollfeed.weights.writing import copy_beside

_KEPT = re.compile(r"embed|lm_head|norm|router|(^|\.)(gate|wte|wpe)\.weight$")
"""Names of matrices that servers hold as they are."""


def quantise_checkpoint(source: Path, folder: Path, *, block: Block | None = (128, 128)) -> None:
    """Write ``source`` in FP8 (e4m3), with scales by block or, without one, by tensor.

    Raises:
        CheckpointError: If the source is unreadable, quantised already, or has values that are not finite, or if there
            is something in the folder.
        OSError: If it cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder}: is there already, and would be replaced: give the name of a new folder")
    config = read_config(source)
    if config.get("quantization_config"):
        raise CheckpointError(f"{source}: its weights are quantised already: give the model before that")
    replace_folder(folder, lambda new: _write(source, new, block=block))


def _write(source: Path, folder: Path, *, block: Block | None) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    copy_beside(source, folder)
    scale, kept = "weight_scale" if block is None else "weight_scale_inv", {"lm_head"}
    files: dict[str, str] = {}
    for file, headers in headers_by_file(source).items():
        tensors = {}
        with safe_open(source / file, framework="pt") as reader:
            for name, header in headers.items():
                tensor = tensors[name] = reader.get_tensor(name)
                if _is_linear(name, header):
                    tensors[name], found = quantise(tensor, block)
                    if not bool(found.isfinite().all()):
                        raise CheckpointError(f"{source}: weight {name!r} has values that are not finite")
                    tensors[f"{name.removesuffix('weight')}{scale}"] = found if block else found.reshape(1)
                elif len(header.shape) == 2:
                    kept.add(name.removesuffix(".weight"))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    about = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    blocks = {} if block is None else {"weight_block_size": list(block)}
    config = {
        **(find_config(source) or {}),
        "quantization_config": about | blocks | {"modules_to_not_convert": sorted(kept)},
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if len(set(files.values())) > 1:
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _is_linear(name: str, header: TensorHeader) -> bool:
    is_matrix = len(header.shape) == 2 and header.is_floating_point and name.endswith(".weight")
    return is_matrix and not _KEPT.search(name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a folder in Hugging Face layout")
    parser.add_argument("folder", type=Path, help="what is written")
    parser.add_argument("--block", type=int, default=128, help="rows and columns of a block; 0 for one scale a tensor")
    given = parser.parse_args(arguments)
    try:
        quantise_checkpoint(given.source, given.folder, block=(given.block, given.block) if given.block else None)
    except (CheckpointError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
