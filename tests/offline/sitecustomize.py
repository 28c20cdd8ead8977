"""Found by every Python that a test starts (conftest.py puts this folder on PYTHONPATH).

It brings the network guard into child processes, which patches of this process cannot reach.
"""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])

sys.path.insert(0, TESTS)
import loopback  # noqa: E402

sys.path.remove(TESTS)
loopback.install()
