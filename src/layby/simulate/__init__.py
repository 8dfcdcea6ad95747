"""What the engine would do, on a virtual clock: cost model, profiles, and how they are measured."""
