"""`python -m nanoserve`: the same as the command `nanoserve`, where it is not on the path."""

from nanoserve.cli import main

if __name__ == "__main__":
    main()
