from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

CheckpointMaker = Callable[..., Path]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> CheckpointMaker:
    """Write a checkpoint as a trainer does: under a temporary name that is then changed."""

    def make(name: str, *, shards: int = 1) -> Path:
        writing = tmp_path / f".{name}.writing"
        writing.mkdir()
        (writing / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        if shards == 1:
            save_file({"a": np.zeros((4, 4), np.float32)}, writing / "model.safetensors")
        else:
            places = {f"t{number}": f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)}
            for tensor, file in places.items():
                save_file({tensor: np.zeros(8, np.float32)}, writing / file)
            text = str({"weight_map": places}).replace("'", '"')
            (writing / "model.safetensors.index.json").write_text(text)
        return writing.rename(tmp_path / name)

    return make
