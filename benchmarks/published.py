"""Published pairs and worked values of the closed form, as the papers print them."""

LEVIATHAN = ((0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86))
"""arXiv 2211.17192, table 1: alpha, gamma, speed with a free draft."""
CHEN = ((7.00, 2.01), (5.73, 2.46))
"""arXiv 2302.01318, table 1: ms per token and speedup of XSum greedy and HumanEval; plain 14.1, draft 1.8, K
4."""
WORKED = (
    (3.3616, 4, 10.0, 1, 1, 2.4011),
    (3.3616, 4, 10.0, 2, 2, 4.8023),
    (3.3616, 4, 10.0, 2, 1, 3.7351),
    (3.3616, 4, 10.0, 1, 2, 2.8013),
    (3.3616, 4, 10.0, 2, 1.5, 4.3847),
    (3.4, 5, 12.5, 1, 1, 2.4286),
    (3.4, 5, 12.5, 2, 2, 4.8571),
    (3.4, 5, 12.5, 2, 1, 3.7778),
)
