"""`python -m bagua.distributed.launch` is bagua-run, for those who know it by that name."""

import sys

from bagua.launch.run import main

if __name__ == "__main__":
    sys.exit(main())
