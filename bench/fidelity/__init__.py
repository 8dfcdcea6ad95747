"""How far the simulator is from the engine: the same arrivals through both, errors side by side."""
