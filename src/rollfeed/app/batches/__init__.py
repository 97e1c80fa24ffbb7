"""The batches of a run."""

from rollfeed.app.batches.cutting import age_limit, batch_cutter, surplus_rule

__all__ = ["age_limit", "batch_cutter", "surplus_rule"]
