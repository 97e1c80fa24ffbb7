"""The weights of a model that is spread over ranks, as files that the process of the run maps into its memory."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollfeed.errors import CheckpointError
from rollfeed.model_files.low_rank import AdaptedNames
from rollfeed.model_files.names import CheckpointNames
from rollfeed.training.ranks.process_ranks import Ranks
from rollfeed.training.ranks.sharding import wholes

_ALL = 1 << 62


def write_weights(names: CheckpointNames, folder: Path, *, ranks: Ranks) -> None:
    """Write the tensors of a checkpoint into a folder, a file a bucket; nothing else holds more than a bucket of them.

    Raises:
        CheckpointError: If they cannot be written.
    """
    problem: Exception | None = None
    adapter = _whole_adapter(names) if isinstance(names, AdaptedNames) else {}
    buckets = chain(
        wholes(names.unchanged),
        # What is converted together comes together.
        (names.reverted(bucket) for group in names.changed for bucket in wholes(group, bucket_bytes=_ALL)),
    )
    for number, bucket in enumerate(buckets):
        if ranks.rank > 0 or problem is not None:  # the others hand over all of it
            continue
        try:
            whole = names.merged(bucket, adapter) if isinstance(names, AdaptedNames) else bucket
            found = {name: tensor.contiguous() for name, tensor in whole.items()}
            save_file(found, folder / f"{number:06d}.safetensors")
        except (OSError, SafetensorError) as error:
            problem = error
    if problem is not None:
        raise CheckpointError(f"{folder}: the weights cannot be written ({problem})") from problem


def write_adapter(names: AdaptedNames, folder: Path, *, base: Path, ranks: Ranks) -> None:
    """Write the adapter alone, as :meth:`AdaptedNames.write_adapter` does; all ranks have to ask.

    Raises:
        CheckpointError: If it cannot be written.
    """
    adapter = _whole_adapter(names)
    if ranks.rank > 0:
        return
    try:
        names.write_adapter(folder, base=base, adapter=adapter)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the adapter cannot be written ({error})") from error


def _whole_adapter(names: AdaptedNames) -> dict[str, Tensor]:
    return {name: tensor for bucket in wholes(names.adapter()) for name, tensor in bucket.items()}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return what :func:`write_weights` wrote, mapped and not read."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
