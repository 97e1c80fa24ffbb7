"""One model trained by several processes of this host: who they are, who computes what, and who holds which rows."""

from rollfeed.training.ranks.dealing import deal, pack_evenly, pass_figures
from rollfeed.training.ranks.process_ranks import ALONE, Ranks
from rollfeed.training.ranks.sharding import decoder_layers, empty_copy, fill, let_go, shard, total_norm, wholes
from rollfeed.training.ranks.weight_files import read_weights, write_adapter, write_weights

__all__ = [
    "ALONE",
    "Ranks",
    "deal",
    "decoder_layers",
    "empty_copy",
    "fill",
    "let_go",
    "pack_evenly",
    "pass_figures",
    "read_weights",
    "shard",
    "total_norm",
    "wholes",
    "write_adapter",
    "write_weights",
]
