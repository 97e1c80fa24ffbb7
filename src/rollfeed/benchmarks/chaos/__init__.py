"""``rollfeed bench chaos``: a run that is killed again and again loses and doubles nothing."""

from rollfeed.benchmarks.chaos.bench import Chaos, KillKind, bench_chaos

__all__ = ["Chaos", "KillKind", "bench_chaos"]
