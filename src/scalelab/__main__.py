"""`python -m scalelab`."""

from scalelab.cli.app import main

if __name__ == "__main__":
    main()
