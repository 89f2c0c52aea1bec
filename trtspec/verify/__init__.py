"""Does a built engine hold what its recipe promises? Losslessness, quality, acceptance, speed."""
