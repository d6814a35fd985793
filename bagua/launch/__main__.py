"""`python -m bagua.launch` is bagua-run."""

import sys

from bagua.launch.run import main

if __name__ == "__main__":
    sys.exit(main())
