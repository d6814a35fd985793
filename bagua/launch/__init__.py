"""bagua-run: starts a program on every rank and stays with it until the last one has ended."""
