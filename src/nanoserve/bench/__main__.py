"""`python -m nanoserve.bench`."""

import sys

from nanoserve.bench.runner import main

if __name__ == "__main__":
    sys.exit(main())
