"""``rollfeed bench chaos``: a run that is killed again and again loses and doubles nothing."""

from rollfeed.benchmarks.chaos.bench import MODES, Chaos, KillKind, bench_chaos

__all__ = ["MODES", "Chaos", "KillKind", "bench_chaos"]
