import sys

from hybrid.perf.tune import main

if __name__ == "__main__":
    sys.exit(main())
