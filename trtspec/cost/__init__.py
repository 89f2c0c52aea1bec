"""What a deployment costs: memory, step times, acceptance, speculation. Pure functions, no tensors.

:mod:`.trace` is the ledger that every number is written into, :mod:`.memory` what must fit, :mod:`.steps`
what one forward takes, :mod:`.acceptance` how many drafted tokens survive, :mod:`.speculation` what follows
from both, :mod:`.estimate` the answer for one deployment and workload, :mod:`.calibrate` how measurements
refit it. ``docs/math.md`` derives the formulas.
"""
