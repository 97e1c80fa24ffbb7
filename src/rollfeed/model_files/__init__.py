"""The files of a model's folder: which ones count, whether they are whole, and what they hold.

Everything that loads, checks or watches a model asks here. Nothing but the modules that load through transformers
imports torch.
"""

from rollfeed.model_files.content import (
    CONFIG_FILE,
    check_content,
    check_regular,
    classified_unit,
    find_config,
    label_names,
    read_config,
    read_eos_token_ids,
    read_object,
    refusal,
)
from rollfeed.model_files.headers import (
    BESIDE_WEIGHTS,
    INDEX_FILE,
    WEIGHTS_FILE,
    TensorHeader,
    check_tensors,
    has_weights,
    headers_by_file,
    read_headers,
    read_stored,
    tell_of_unknown,
    weight_files,
)

__all__ = [
    "BESIDE_WEIGHTS",
    "CONFIG_FILE",
    "INDEX_FILE",
    "WEIGHTS_FILE",
    "TensorHeader",
    "check_content",
    "check_regular",
    "check_tensors",
    "classified_unit",
    "find_config",
    "has_weights",
    "headers_by_file",
    "label_names",
    "read_config",
    "read_eos_token_ids",
    "read_headers",
    "read_object",
    "read_stored",
    "refusal",
    "tell_of_unknown",
    "weight_files",
]
