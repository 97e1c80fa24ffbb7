"""``rollfeed bench fleet``: the driver of more servers than this machine has, with simulated servers and real parts."""
