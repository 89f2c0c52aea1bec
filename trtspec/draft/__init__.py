"""Draft heads: the target's answers, training on them, and what a folder of trained heads says of itself."""
