"""Two classes on one engine, simulated and real: see ``__main__``."""
