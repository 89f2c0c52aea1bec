"""Draft heads: the target's answers, features, training, and what a folder of trained heads says of itself."""
