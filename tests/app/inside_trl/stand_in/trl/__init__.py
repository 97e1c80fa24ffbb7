"""What rollfeed looks up in TRL 1.16.0, with its signatures; the real one is tested in tests/engines."""


class GRPOTrainer: ...
