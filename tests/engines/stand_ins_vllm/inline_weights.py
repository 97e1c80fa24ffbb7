"""A plug-in of vLLM: its backend ``ipc`` with the bytes of a bucket in place of a handle, which only GPUs have.

All else is vLLM's own: routes, requests, the start and end of an update, and how a bucket is taken apart.
"""

from typing import Any


def register() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    class InlineEngine(IPCWeightTransferEngine):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            import torch

            info = self.parse_update_info(update_info)
            assert self.packed
            ((_, (bytes_B,)),) = info.ipc_handles.items()
            dtypes = [getattr(torch, name) for name in info.dtype_names]
            self.model.load_weights(unpack_tensor(bytes_B, info.names, info.shapes, dtypes, info.tensor_sizes))

    if "inline" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("inline", InlineEngine)
