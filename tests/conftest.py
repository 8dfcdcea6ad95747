"""What all tests share: quiet threads, and Hypothesis without deadlines."""

from __future__ import annotations

import os

from hypothesis import settings

# As layby.engine.build sets it, but before the first test module imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A busy machine is not a failing test. In CI the same examples come every time.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
