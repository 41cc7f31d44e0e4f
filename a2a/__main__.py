"""`python -m a2a`."""

from a2a.cli import main

if __name__ == "__main__":
    main()
