"""``python -m trtspec``."""

import sys

from trtspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
